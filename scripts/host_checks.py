#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The tests of the reference backend under instruments, and many times. Each check builds what it needs of a preset of its own and runs all
tests but those of GPUs, fuzz targets and the slow ones.

  asan      AddressSanitizer and UndefinedBehaviorSanitizer; leaks of the tests that do not start MPI
  tsan      ThreadSanitizer; without the tests that start MPI, whose library is not instrumented
  coverage  lines and branches that the tests execute, by room of the sources (gcov)
  repeats   every test --repeats times, one round after the other

  scripts/host_checks.py asan --json checks.json
  scripts/host_checks.py asan --budget 480 --json checks.json --resume    what is missing there, for at most eight minutes
  scripts/host_checks.py tsan --tests 'exchange|thread_group'
The report has one entry a check; those of other checks stay. Output of tests that fail is printed and kept in build/PRESET/host_checks. Exit
status 0 if every test ran and passed, 1 if not, 3 if nothing failed but the budget ended it.
"""

import argparse
import collections
import concurrent.futures
import datetime
import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from jobs import ROOT, commit, descendants, machine

PRESETS = {"asan": "asan", "tsan": "tsan", "coverage": "coverage", "repeats": "cpu"}
LEFT_OUT = {"slow", "gpu", "fuzz"}
WITH_MPI = {"mpi", "cli"}
ONCE = {"cli"}  # not twice at a time: they keep files in the build's folder
# the first ones are the longest
ORDER = ["golden", "mpi", "cli", "unit"]
FLOORS = ("kernels/", "layers/", "model/")
FAILED, ENDED = 1, 3  # exit statuses
ENVIRONMENT = {
    # teams of one: GCC's OpenMP runtime is not instrumented, and counts that threads share are lost or slow
    "tsan": {"OMP_THREAD_LIMIT": "1", "TSAN_OPTIONS": "halt_on_error=0 exitcode=66"},
    # what libgcov says of counts that a killed process left half written is no output of the program
    "coverage": {"OMP_THREAD_LIMIT": "1", "GCOV_ERROR_FILE": "/dev/null"},
}
# Open MPI does not free all it allocates; its plug-ins are unloaded when leaks are looked for, so no suppression finds them. The library with
# the faults is loaded before the sanitizer's.
NO_LEAKS = {"ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0"}

Test = collections.namedtuple("Test", "name targets labels command environment folder timeout slots skipped")


class Budget:
    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def left(self):
        return max(0.0, self.end - time.monotonic())


def stop(process):
    for pid in [*descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def run_within(budget, line, log):
    """False where the budget ended the command; ends the program where it failed."""
    with open(log, "w") as output:
        process = subprocess.Popen(line, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(min(budget.left(), 1e7))
        except subprocess.TimeoutExpired:
            stop(process)
            return False
    if process.returncode != 0:
        with open(log, errors="replace") as output:
            sys.exit(output.read()[-4000:] + f"\nfailed: {shlex.join(line)}")
    return True


def tests_of(folder, check, options):
    """Those that the check runs, as ctest knows them. A test whose program is not built yet has no command."""
    text = subprocess.run(["ctest", "--test-dir", folder, "--show-only=json-v1"], capture_output=True, text=True, check=True).stdout
    tests = []
    for test in json.loads(text)["tests"]:
        properties = {item["name"]: item["value"] for item in test["properties"]}
        labels, command = set(properties.get("LABELS", [])), test.get("command", [])
        if labels & LEFT_OUT or (check == "tsan" and labels & WITH_MPI) or not re.search(options.tests, test["name"]):
            continue
        environment = dict(item.split("=", 1) for item in properties.get("ENVIRONMENT", []))
        environment.update(ENVIRONMENT.get(check, {}), **(NO_LEAKS if check == "asan" and labels & WITH_MPI else {}))
        # what a test runs: its own program, or that without which it says it cannot run
        built = [os.path.basename(word) for word in command if word.startswith(f"{folder}/tests/")][:1] if command else [test["name"]]
        built += [os.path.relpath(file, folder) for file in properties.get("REQUIRED_FILES", [])]
        limit = properties.get("TIMEOUT", options.timeout)
        tests.append(Test(test["name"], built, labels, command, environment,
                          properties.get("WORKING_DIRECTORY", folder), limit if check == "repeats" else max(limit, options.timeout),
                          properties.get("PROCESSORS", 1), properties.get("SKIP_RETURN_CODE")))
    return sorted(tests, key=lambda test: (min((ORDER.index(label) for label in test.labels if label in ORDER), default=len(ORDER)), test.name))


def build(check, budget, options):
    """The tests of the check, built; none where the budget ended that."""
    preset, folder = PRESETS[check], f"{ROOT}/build/{PRESETS[check]}"
    os.makedirs(folder, exist_ok=True)
    if not run_within(budget, ["bash", "-c", f"source scripts/common.sh; configure {preset}"], f"{folder}/host_checks_configure.log"):
        return []
    targets = sorted({target for test in tests_of(folder, check, options) for target in test.targets})
    if targets and not run_within(budget, ["ninja", "-C", folder, "-j", str(options.jobs), *targets], f"{folder}/host_checks_build.log"):
        return []
    return tests_of(folder, check, options)


class Results:
    """What became of the tests: of each its runs, the seconds of the longest, and the failures among them. `before`: of an earlier call."""

    def __init__(self, logs, before):
        self.logs = logs
        self.seconds, self.failed = dict(before["seconds of tests"]), dict(before["failed"])
        self.skipped = set(before["skipped"])
        self.runs = {name: before["repeats"] - before["not run"].get(name, 0) for name in self.seconds}

    def add(self, test, log, seconds, status, late):
        if test.skipped is not None and status == test.skipped:
            self.skipped.add(test.name)
        else:
            self.runs[test.name] = self.runs.get(test.name, 0) + 1
            self.seconds[test.name] = round(max(self.seconds.get(test.name, 0.0), seconds), 1)
            if status != 0:
                self.failed[test.name] = self.failed.get(test.name, 0) + 1
                shutil.copy(log, f"{self.logs}/failed_{test.name}_{self.failed[test.name]}.log")
                with open(log, errors="replace") as file:
                    why = f"stopped after {seconds:.0f} s" if late else f"status {status}, {seconds:.0f} s"
                    print(f"-- {test.name} failed: {why}\n{file.read()[-3000:]}", flush=True)
        os.remove(log)

    def left(self, test, repeats):
        return 0 if test.name in self.skipped else max(0, repeats - self.runs.get(test.name, 0))


def run_queue(queue, jobs, budget, results, scratch):
    """Runs tests side by side, as many as have a core each, in about this order, until the budget ends. scratch: a folder for their jobs."""
    queue, running, started = list(queue), [], 0
    while queue or running:
        for item in list(running):
            test, process, log, began = item
            seconds = time.monotonic() - began
            late = process.poll() is None and seconds > test.timeout
            if process.poll() is None and not late and budget.left() > 0:
                continue
            if late or process.poll() is None:
                stop(process)
            running.remove(item)
            if late or budget.left() > 0 or process.returncode == 0:
                results.add(test, log, seconds, process.returncode, late)
        if budget.left() == 0:
            queue = []
        for test in list(queue):
            used = sum(min(other.slots, jobs) for other, *_ in running)
            if used + min(test.slots, jobs) > jobs or (test.labels & ONCE and any(other.name == test.name for other, *_ in running)):
                continue
            started += 1
            log = f"{results.logs}/{test.name}_{started}.log"
            with open(log, "w") as output:
                # jobs that share Open MPI's session folder can take it from under one another
                sessions = os.path.join(scratch, str(started))
                os.mkdir(sessions)
                environment = dict(os.environ, OMPI_MCA_orte_tmpdir_base=sessions, **test.environment)
                process = subprocess.Popen(test.command, cwd=test.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                           env=environment)
            running.append((test, process, log, time.monotonic()))
            queue.remove(test)
        time.sleep(0.02)


def room_of(path):
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
            if not path.startswith(FLOORS):
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
    """By room. What is compiled into several objects, or instantiated several times, counts once: as executed if one of them was."""
    lines, branches = {}, {}
    notes = glob.glob(f"{folder}/CMakeFiles/**/*.gcda", recursive=True)
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(counts_of, notes, chunksize=4):
            for path, of_lines, of_branches in found:
                for all_counts, counts in ((lines, of_lines), (branches, of_branches)):
                    known = all_counts.setdefault(path, {})
                    for key, executed in counts.items():
                        known[key] = known.get(key, False) or executed
    rooms = {}
    for path in lines:
        room = rooms.setdefault(room_of(path), {"lines": 0, "executed lines": 0, "branches": 0, "taken branches": 0})
        room["lines"] += len(lines[path])
        room["executed lines"] += sum(lines[path].values())
        room["branches"] += len(branches[path])
        room["taken branches"] += sum(branches[path].values())
    return dict(sorted(rooms.items()))


def print_coverage(rooms):
    total = {key: sum(room[key] for room in rooms.values()) for key in next(iter(rooms.values()))} if rooms else {}
    for name, room in [*rooms.items(), *([("all", total)] if rooms else [])]:
        share = [f"{room[done]:>6} of {room[all_]:>6} {all_} {room[done] / max(1, room[all_]):>7.1%}"
                 for done, all_ in (("executed lines", "lines"), ("taken branches", "branches"))]
        print(f"  {name:<28} {'   '.join(share)}")


NOTHING = {"machine": "", "seconds of tests": {}, "failed": {}, "skipped": [], "not run": {}, "repeats": 0, "build seconds": 0, "seconds": 0}


def earlier(check, options):
    """The entries of other checks in the report, and that of this one where it goes on."""
    runs = []
    if options.json and os.path.exists(options.json):
        with open(options.json) as file:
            runs = json.load(file)["runs"]
    mine = [run for run in runs if run["check"] == check and run["commit"] == options.commit]
    return [run for run in runs if run["check"] != check], mine[0] if options.resume and mine else NOTHING


def run_check(check, options, budget):
    """Runs one check and writes the report; returns the exit status."""
    folder = f"{ROOT}/build/{PRESETS[check]}"
    logs = f"{folder}/host_checks"
    repeats = options.repeats if check == "repeats" else 1
    others, before = earlier(check, options)
    began = time.monotonic()
    tests = build(check, budget, options)
    if not tests:
        print(f"{check}: no test, or its build did not end within the budget; the next call goes on with it", flush=True)
        return ENDED
    built = time.monotonic()
    if before is NOTHING:
        shutil.rmtree(logs, ignore_errors=True)
        for old in glob.glob(f"{folder}/**/*.gcda", recursive=True):
            os.remove(old)
    os.makedirs(logs, exist_ok=True)
    results = Results(logs, before)
    queue = [test for turn in range(repeats) for test in tests if turn < results.left(test, repeats)]
    with tempfile.TemporaryDirectory(prefix="fp8flow", ignore_cleanup_errors=True) as scratch:
        run_queue(queue, options.jobs, budget, results, scratch)
    missing = {test.name: results.left(test, repeats) for test in tests if results.left(test, repeats) > 0}
    entry = {"check": check, "commit": options.commit, "date": datetime.date.today().isoformat(),
             "machine": " and ".join(dict.fromkeys([*filter(None, before["machine"].split(" and ")), machine()])),
             "command": shlex.join(["scripts/host_checks.py", *sys.argv[1:]]), "build seconds": before["build seconds"] + round(built - began),
             "seconds": before["seconds"] + round(time.monotonic() - built), "repeats": repeats, "tests": len(results.runs),
             "runs": sum(results.runs.values()), "failed": results.failed, "not run": missing, "skipped": sorted(results.skipped),
             "seconds of tests": dict(sorted(results.seconds.items()))}
    print(f"{check}: {entry['tests']} tests, {entry['runs']} runs, {sum(results.failed.values())} failed, {len(results.skipped)} skipped, "
          f"{sum(missing.values())} runs left; build {entry['build seconds']} s, tests {entry['seconds']} s", flush=True)
    if check == "coverage":
        entry["rooms"] = coverage(folder, options.jobs)
        print_coverage(entry["rooms"])
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"runs": sorted([*others, entry], key=lambda run: list(PRESETS).index(run["check"]))}, file, indent=1)
            file.write("\n")
    return FAILED if results.failed else ENDED if missing else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(PRESETS)}; default all")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tests", default="", help="only tests whose name matches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=int, default=900, help="seconds a test may take under an instrument, where ctest does not say more")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for all, the build included; what runs then is stopped")
    parser.add_argument("--resume", action="store_true", help="keep what --json has of the same check and commit, and run what is missing")
    parser.add_argument("--commit", default=commit(), help="written into the report; default: of this checkout")
    parser.add_argument("--json", help="the report goes there")
    options = parser.parse_args()
    checks = options.checks or list(PRESETS)
    if unknown := set(checks) - set(PRESETS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; want some of {', '.join(PRESETS)}")
    budget = Budget(options.budget)
    statuses = {run_check(check, options, budget) for check in checks}
    return FAILED if FAILED in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main())
