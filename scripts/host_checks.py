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
The report has one entry per check; it keeps those of other checks. The output of failed tests is in build/PRESET/Testing. Exit status 1 if a test failed.
"""

import argparse
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
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ, **environment))
    text = ""
    for output in process.stdout:
        print(output, end="", flush=True)
        text += output
    process.wait()
    return RESULT.findall(text)


def folder_of(path):
    """kernels/hopper/gemm/sm90/fp8.cu: kernels/hopper/gemm; layers/flows/steps.cpp: layers/flows."""
    parts = os.path.dirname(path).split("/")
    return "/".join(parts[:3] if parts[:2] == ["kernels", "hopper"] else parts[:2])


def counts_of(notes):
    """[(source, {line: executed}, {(line, branch): taken})] of one object; branches of exceptions are left out."""
    done = subprocess.run(["gcov", "--json-format", "--branch-probabilities", "--stdout", notes], cwd=os.path.dirname(notes),
                          capture_output=True, text=True)
    found = []
    for text in done.stdout.splitlines():
        data = json.loads(text)
        for file in data["files"]:
            path = os.path.relpath(os.path.join(data["current_working_directory"], file["file"]), ROOT)
            if not path.startswith(SOURCES):
                continue
            lines, branches = {}, {}
            for line in file["lines"]:
                number = line["line_number"]
                lines[number] = lines.get(number, False) or line["count"] > 0
                for i, branch in enumerate(line["branches"]):
                    if not branch["throw"]:
                        branches[number, i] = branches.get((number, i), False) or branch["count"] > 0
            found.append((path, lines, branches))
    return found


def coverage(folder, jobs):
    """By folder. What is compiled into several objects, or instantiated several times, counts once: as executed if one of them was."""
    lines, branches = {}, {}
    notes = glob.glob(f"{folder}/CMakeFiles/**/*.gcda", recursive=True)
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(counts_of, notes, chunksize=4):
            for path, of_lines, of_branches in found:
                for all_counts, counts in ((lines, of_lines), (branches, of_branches)):
                    known = all_counts.setdefault(path, {})
                    for key, executed in counts.items():
                        known[key] = known.get(key, False) or executed
    folders = {}
    for path in lines:
        entry = folders.setdefault(folder_of(path), {"lines": 0, "executed lines": 0, "branches": 0, "taken branches": 0})
        entry["lines"] += len(lines[path])
        entry["executed lines"] += sum(lines[path].values())
        entry["branches"] += len(branches[path])
        entry["taken branches"] += sum(branches[path].values())
    return dict(sorted(folders.items()))


def print_coverage(folders):
    total = {key: sum(entry[key] for entry in folders.values()) for key in next(iter(folders.values()))} if folders else {}
    for name, entry in [*folders.items(), *([("all", total)] if folders else [])]:
        share = [f"{entry[done]:>6} of {entry[all_]:>6} {all_} {entry[done] / max(1, entry[all_]):>7.1%}"
                 for done, all_ in (("executed lines", "lines"), ("taken branches", "branches"))]
        print(f"  {name:<28} {'   '.join(share)}")


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
        print_coverage(entry["folders"])
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
        others = []
        if os.path.exists(options.json):
            with open(options.json) as file:
                others = [entry for entry in json.load(file)["runs"] if entry["check"] not in options.checks]
        write_json(options.json, {"runs": sorted([*others, *entries], key=lambda entry: list(PRESETS).index(entry["check"]))})
    return 1 if any(entry["failed"] or not entry["tests"] for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
