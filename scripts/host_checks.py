#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The tests of the reference backend under instruments, and many times. Each check builds a preset of its own and runs all tests but the slow ones.

  asan      AddressSanitizer and UndefinedBehaviorSanitizer; leaks of the tests that do not start MPI
  tsan      ThreadSanitizer; without the tests that start MPI, whose library is not instrumented
  coverage  lines that the tests execute, by room of the sources (gcov)
  repeats   every test --repeats times, until it fails

  scripts/host_checks.py --json checks.json
  scripts/host_checks.py --checks tsan --tests exchange
Exit status 1 if a test fails. The logs of ctest are in the build folders, as host_checks.log.
"""

import argparse
import datetime
import glob
import json
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree

from jobs import ROOT, commit, machine

PRESETS = {"asan": "asan", "tsan": "tsan", "coverage": "coverage", "repeats": "cpu"}
SLOW = "slow|gpu|fuzz"
FLOORS = ("kernels", "layers", "model")


def run(line, **more):
    return subprocess.run(line, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


def build(preset, jobs):
    done = run(["bash", "-c", f"source scripts/common.sh; configure {preset} && ninja -C build/{preset} -j {jobs}"])
    if done.returncode != 0:
        sys.exit(done.stdout[-4000:])


def passes_of(check):
    """(labels to run, labels to leave out, environment) of each run of ctest."""
    if check == "tsan":
        # a team of one: GCC's OpenMP runtime is not instrumented
        return [("", SLOW + "|mpi|cli", {"OMP_THREAD_LIMIT": "1", "TSAN_OPTIONS": "halt_on_error=0 exitcode=66"})]
    if check == "asan":
        # Open MPI does not free all it allocates; its plug-ins are unloaded by then, so no suppression finds them
        return [("", SLOW + "|mpi|cli", {}), ("mpi|cli", SLOW, {"ASAN_OPTIONS": "detect_leaks=0"})]
    return [("", SLOW, {})]


def run_tests(check, options):
    """Runs ctest; returns its results."""
    folder = f"{ROOT}/build/{PRESETS[check]}"
    junit = f"{folder}/host_checks.xml"
    result = {"tests": 0, "failed": [], "skipped": []}
    began = time.time()
    with open(f"{folder}/host_checks.log", "w") as log:
        for labels, without, environment in passes_of(check):
            line = ["ctest", "--test-dir", folder, "-j", str(options.jobs), "--timeout", str(options.timeout), "--output-on-failure",
                    "--output-junit", junit, "-LE", without]
            line += ["-L", labels] if labels else []
            line += ["-R", options.tests] if options.tests else []
            line += ["--repeat", f"until-fail:{options.repeats}"] if check == "repeats" else []
            if os.path.exists(junit):
                os.remove(junit)
            subprocess.run(line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ, **environment))
            if not os.path.exists(junit):
                continue  # no test matches
            cases = xml.etree.ElementTree.parse(junit).getroot().findall("testcase")
            result["tests"] += len(cases)
            result["failed"] += [case.get("name") for case in cases if case.get("status") == "fail"]
            result["skipped"] += [case.get("name") for case in cases if case.get("status") in ("notrun", "disabled", "skipped")]
    return dict(result, seconds=round(time.time() - began))


def room_of(path):
    """kernels/hopper/gemm/sm90/fp8.cu: kernels/hopper/gemm; layers/flows/steps.cpp: layers/flows."""
    parts = os.path.dirname(path).split("/")
    return "/".join(parts[:3] if parts[:2] == ["kernels", "hopper"] else parts[:2])


def lines_of(folder):
    """{source: {line: executed}} of all objects."""
    sources = {}
    for notes in glob.glob(f"{folder}/**/*.gcda", recursive=True):
        done = subprocess.run(["gcov", "--json-format", "--stdout", notes], cwd=folder, capture_output=True, text=True)
        for text in done.stdout.splitlines():
            for file in json.loads(text)["files"]:
                path = os.path.relpath(os.path.join(folder, file["file"]), ROOT)
                if not path.startswith(FLOORS):
                    continue
                lines = sources.setdefault(path, {})
                for line in file["lines"]:
                    lines[line["line_number"]] = lines.get(line["line_number"], False) or line["count"] > 0
    return sources


def coverage():
    rooms = {}
    for path, lines in lines_of(f"{ROOT}/build/coverage").items():
        room = rooms.setdefault(room_of(path), {"lines": 0, "executed": 0})
        room["lines"] += len(lines)
        room["executed"] += sum(lines.values())
    return dict(sorted(rooms.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", default=",".join(PRESETS), help="of asan, tsan, coverage, repeats; default all")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tests", default="", help="only tests that match")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=int, default=900, help="seconds a test may take")
    parser.add_argument("--json", help="the report goes there")
    options = parser.parse_args()
    checks = options.checks.split(",")
    if unknown := set(checks) - set(PRESETS):
        parser.error(f"--checks: unknown {', '.join(sorted(unknown))}; want some of {', '.join(PRESETS)}")

    report = {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine(),
              "command": shlex.join(["scripts/host_checks.py", "--checks", options.checks, "--repeats", str(options.repeats)]), "checks": {}}
    for check in checks:
        began = time.time()
        build(PRESETS[check], options.jobs)
        if check == "coverage":
            for old in glob.glob(f"{ROOT}/build/coverage/**/*.gcda", recursive=True):
                os.remove(old)
        result = report["checks"][check] = run_tests(check, options)
        result["build seconds"] = round(time.time() - began) - result["seconds"]
        if check == "repeats":
            result["repeats"] = options.repeats
        print(f"{check:<9} {result['tests']} tests, {len(result['failed'])} failed, {len(result['skipped'])} skipped, {result['seconds']} s")
        for name in result["failed"]:
            print(f"  failed: {name}")
        if check == "coverage":
            result["rooms"] = coverage()
            for room, count in result["rooms"].items():
                print(f"  {room:<28} {count['executed']:>6} of {count['lines']:>6} lines {count['executed'] / count['lines']:>7.1%}")
        if options.json:
            with open(options.json, "w") as file:
                json.dump(report, file, indent=2)
                file.write("\n")
        sys.stdout.flush()
    return 1 if any(result["failed"] for result in report["checks"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
