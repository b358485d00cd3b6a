#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The tests of the reference backend under instruments, and many times. Each check builds a preset of its own and runs its tests with ctest, but
those of GPUs, fuzz targets and slow ones.

  asan      AddressSanitizer and UndefinedBehaviorSanitizer; leaks of the tests that do not start MPI
  tsan      ThreadSanitizer; without the tests that start MPI, because its library is not instrumented
  coverage  lines and branches that the tests execute, by folder of the sources (gcov)
  repeats   every test --repeats times

  scripts/host_checks.py asan --json checks.json
  scripts/host_checks.py tsan --tests 'exchange|thread_group'
The report has one entry per check. The output of failed tests is in build/PRESET/Testing. Exit status 1 if a test failed.
"""

import argparse
import collections
import concurrent.futures
import glob
import json
import os
import re
import subprocess
import sys
import time

from jobs import ROOT, origin, write_json

PRESETS = {"asan": "asan", "tsan": "tsan", "coverage": "coverage", "repeats": "cpu"}
LEFT_OUT = "slow|gpu|fuzz|sanitizer|bench|faults"
SOURCES = ("kernels/", "layers/", "model/")
ENVIRONMENT = {
    # teams of one: GCC's OpenMP runtime is not instrumented, and counts that threads share are lost or slow
    "tsan": {"OMP_THREAD_LIMIT": "1", "TSAN_OPTIONS": "halt_on_error=0 exitcode=66"},
    # libgcov reports counts that a killed process left half written; they are no output of the program
    "coverage": {"OMP_THREAD_LIMIT": "1", "GCOV_ERROR_FILE": "/dev/null"},
}
# Open MPI does not free all it allocates; its plug-ins are unloaded when leaks are looked for, so no suppression finds them. The library with
# the faults is loaded before the sanitizer's.
NO_LEAKS = {"ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0"}
RESULT = re.compile(r"^ *\d+/\d+ Test +#\d+: (\S+) [. ]*(?:\*\*\*)?([A-Z][A-Za-z: ]*[a-z]) +([\d.]+) sec", re.M)


def run_tests(folder, options, select, environment):
    """[(test, result, seconds)], as ctest prints them."""
    line = ["ctest", "--test-dir", folder, "-j", str(options.jobs), "--timeout", str(options.timeout), "--output-on-failure", "-R", options.tests or ".",
            *select]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ, **environment)) as process:
        output = []
        for text in process.stdout:
            print(text, end="", flush=True)
            output.append(text)
    return RESULT.findall("".join(output))


def folder_of(path):
    """kernels/hopper/gemm/sm90/fp8.cu: kernels/hopper/gemm; layers/flows/steps.cpp: layers/flows."""
    parts = os.path.dirname(path).split("/")
    return "/".join(parts[:3] if parts[:2] == ["kernels", "hopper"] else parts[:2])


def counts_of(notes):
    """{(source, line) or (source, line, branch): executed} of one object; branches of exceptions are left out."""
    done = subprocess.run(["gcov", "--json-format", "--branch-probabilities", "--stdout", notes], cwd=os.path.dirname(notes),
                          capture_output=True, text=True)
    counts = collections.Counter()
    for data in map(json.loads, done.stdout.splitlines()):
        for file in data["files"]:
            path = os.path.relpath(os.path.join(data["current_working_directory"], file["file"]), ROOT)
            for line in file["lines"] if path.startswith(SOURCES) else []:
                counts[path, line["line_number"]] += line["count"]
                for i, branch in enumerate(line["branches"]):
                    if not branch["throw"]:
                        counts[path, line["line_number"], i] += branch["count"]
    return {key: count > 0 for key, count in counts.items()}


def coverage(folder, jobs):
    """By folder. What is compiled into several objects, or instantiated several times, counts once: as executed if one of them was."""
    executed, notes = collections.Counter(), glob.glob(f"{folder}/CMakeFiles/**/*.gcda", recursive=True)
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for counts in pool.map(counts_of, notes, chunksize=4):
            executed.update(counts)
    folders = {name: dict.fromkeys(["lines", "executed lines", "branches", "taken branches"], 0)
               for name in ["all", *sorted({folder_of(key[0]) for key in executed})]}
    for key, count in executed.items():
        whole, part = ("lines", "executed lines") if len(key) == 2 else ("branches", "taken branches")
        for entry in (folders["all"], folders[folder_of(key[0])]):
            entry[whole] += 1
            entry[part] += count > 0
    for name, entry in folders.items():
        print(f"  {name:<28}" + "".join(f" {entry[part]:>6} of {entry[whole]:>6} {whole} {entry[part] / max(1, entry[whole]):>7.1%}"
                                        for whole, part in (("lines", "executed lines"), ("branches", "taken branches"))))
    return folders


def run_check(check, options):
    """Runs one check; returns its entry in the report."""
    folder, began = f"{ROOT}/build/{PRESETS[check]}", time.monotonic()
    subprocess.run(["bash", "-c", f"source scripts/common.sh; configure {PRESETS[check]}; build {PRESETS[check]}"], cwd=ROOT, check=True)
    built = time.monotonic()
    for old in glob.glob(f"{folder}/**/*.gcda", recursive=True):
        os.remove(old)
    environment = ENVIRONMENT.get(check, {})
    if check == "asan":
        results = run_tests(folder, options, ["-LE", f"{LEFT_OUT}|mpi|cli"], environment) + \
            run_tests(folder, options, ["-LE", LEFT_OUT, "-L", "mpi|cli"], NO_LEAKS)
    elif check == "tsan":
        results = run_tests(folder, options, ["-LE", f"{LEFT_OUT}|mpi|cli"], environment)
    else:
        more = ["--repeat", f"until-fail:{options.repeats}"] if check == "repeats" else []
        results = run_tests(folder, options, ["-LE", LEFT_OUT, *more], environment)
    entry = {"check": check, **origin(), "build seconds": round(built - began),
             "seconds": round(time.monotonic() - built), "repeats": options.repeats if check == "repeats" else 1, "tests": len(results),
             "failed": {name: what for name, what, _ in results if what not in ("Passed", "Skipped")},
             "skipped": [name for name, what, _ in results if what == "Skipped"], "seconds of tests": {name: float(s) for name, _, s in sorted(results)}}
    if check == "coverage":
        entry["folders"] = coverage(folder, options.jobs)
    print(f"{check}: {entry['tests']} tests, {len(entry['failed'])} failed, {len(entry['skipped'])} skipped; build {entry['build seconds']} s, "
          f"tests {entry['seconds']} s", flush=True)
    return entry


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", metavar="CHECK", choices=PRESETS, help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tests", default="", help="only tests whose name matches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=int, default=900, help="seconds a test may take, where ctest does not say more")
    parser.add_argument("--json", help="the report goes there")
    options = parser.parse_args()
    entries = [run_check(check, options) for check in options.checks]
    if options.json:
        write_json(options.json, {"runs": entries})
    return 1 if any(entry["failed"] or not entry["tests"] for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
