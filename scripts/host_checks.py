#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The tests of the reference backend under a sanitizer, with coverage counted, or again and again. What takes too long for every change.

  scripts/host_checks.py asan                   AddressSanitizer and UBSan: every test without label slow
  scripts/host_checks.py tsan                   ThreadSanitizer: the tests whose ranks are threads (OpenMP's threads are off: it does not know them)
  scripts/host_checks.py coverage               lines and branches that the tests reach, by room
  scripts/host_checks.py repeat --times 20      the suite so often: tests that fail now and then
Options after -- go to ctest. Builds into build/PRESET. Exit status 0 if every test passes.
"""

import argparse
import collections
import datetime
import glob
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PRESETS = {"asan": "asan", "tsan": "tsan", "coverage": "coverage", "repeat": "cpu"}
THREAD_RANKS = "^(exchange|thread_group|turns|side_lane|delayed_wgrads|balancing_ranks|parallel|trainer|trainer_flight|trainer_failures|divergence|checkpoint)_test$"
ROOMS = ("kernels/core", "kernels/comm", "kernels/ops", "kernels/reference", "layers", "model")
REPORT = re.compile(r"ERROR: AddressSanitizer|runtime error:|WARNING: ThreadSanitizer")


def shell(line, **more):
    return subprocess.run(["bash", "-c", line], cwd=ROOT, text=True, **more)


def build(preset):
    done = shell(f"source scripts/common.sh; configure {preset} && build {preset}")
    if done.returncode != 0:
        sys.exit("the build failed")


def run_tests(preset, arguments, environment, log):
    """Counts of passed, failed and skipped tests, and of reports in the output."""
    line = ["ctest", "--test-dir", f"build/{preset}", "-j", str(os.cpu_count()), "-LE", "slow", "--output-on-failure", "--timeout", "1500", *arguments]
    counts, failed = collections.Counter(), []
    with open(log, "a") as file, subprocess.Popen(line, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                                  env={**os.environ, **environment}) as process:
        for text in process.stdout:
            file.write(text)
            counts["reports"] += bool(REPORT.search(text))
            found = re.match(r"\s*\d+/\d+ Test +#\d+: (\S+) \.+ *(Passed|\*\*\*Skipped|\*\*\*)", text)
            if found:
                what = {"Passed": "passed", "***Skipped": "skipped"}.get(found[2], "failed")
                counts[what] += 1
                if what == "failed":
                    failed.append(found[1])
                print(text, end="", flush=True)
    return counts, failed


def coverage(preset):
    """room -> lines, lines reached, branches, branches reached."""
    lines, branches = {}, {}
    for notes in glob.glob(f"{ROOT}/build/{preset}/**/*.gcno", recursive=True):
        if not os.path.exists(notes[:-4] + "gcda"):
            continue
        text = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", notes], capture_output=True, text=True,
                              cwd=os.path.dirname(notes)).stdout
        for document in text.splitlines():
            for file in json.loads(document)["files"]:
                path = os.path.relpath(os.path.join(f"{ROOT}/build/{preset}", file["file"]), ROOT)
                if not path.startswith(ROOMS):
                    continue
                for line in file["lines"]:
                    place = (path, line["line_number"])
                    lines[place] = lines.get(place, 0) + line["count"]
                    for i, branch in enumerate(line["branches"]):
                        if not branch["throw"]:
                            branches[(*place, i)] = branches.get((*place, i), 0) + branch["count"]
    result = {}
    for room in ROOMS:
        of_room = [[count > 0 for place, count in counts.items() if place[0].startswith(room + "/")] for counts in (lines, branches)]
        result[room] = {"lines": len(of_room[0]), "reached": sum(of_room[0]), "branches": len(of_room[1]), "branches reached": sum(of_room[1])}
    return result


def main():
    words = sys.argv[1:]
    own, rest = (words[:words.index("--")], words[words.index("--") + 1:]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=PRESETS)
    parser.add_argument("--times", type=int, default=20, help="repeat")
    parser.add_argument("--json", help="the report goes there")
    options = parser.parse_args(own)
    preset, began = PRESETS[options.check], time.time()
    build(preset)
    log = f"{ROOT}/build/{preset}/host_checks.log"
    open(log, "w").close()
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}  # MPI and its helpers leak
    if options.check == "tsan":
        environment = {"OMP_NUM_THREADS": "1", "TSAN_OPTIONS": "halt_on_error=1"}
        rest = rest or ["-R", THREAD_RANKS]
    total, failed = collections.Counter(), []
    for turn in range(options.times if options.check == "repeat" else 1):
        counts, names = run_tests(preset, rest, environment, log)
        total += counts
        failed += names
        if options.check == "repeat":
            print(f"== {turn + 1} of {options.times}, {time.time() - began:.0f} s: {total['failed']} failures so far", flush=True)
    report = {"command": shlex.join(["scripts/host_checks.py", *re.sub(r"--json \S+ ?", "", " ".join(sys.argv[1:])).split()]),
              "date": f"{datetime.date.today()}",
              "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
              "machine": f"no GPU, {os.cpu_count()} CPU cores, {platform.machine()}", "seconds": round(time.time() - began),
              "passed": total["passed"], "failed": total["failed"], "skipped": total["skipped"], "sanitizer reports": total["reports"], "failures": failed}
    print(f"\n{options.check}: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped, {total['reports']} reports of a sanitizer, "
          f"{report['seconds']} s; {log}")
    if options.check == "coverage":
        report["rooms"] = coverage(preset)
        print(f"{'room':<20}{'lines':>8}{'reached':>9}{'branches':>10}{'reached':>9}")
        for room, c in report["rooms"].items():
            share = [100 * c[a] / max(c[b], 1) for a, b in (("reached", "lines"), ("branches reached", "branches"))]
            print(f"{room:<20}{c['lines']:>8}{share[0]:>8.1f}%{c['branches']:>10}{share[1]:>8.1f}%")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return 0 if total["failed"] == 0 and total["passed"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
