#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Plants known mistakes in a copy of the sources, one at a time, and runs the test that should catch each: a suite that lets one pass has a hole.

The registry is tests/planted/*.patch. Each begins with three lines and goes on with a diff that `git apply` takes:
  plants: what is wrong then, in a sentence
  family: norm, router, exchange, schedule, checkpoint, ...; `hopper ...` needs a Hopper GPU
  test: the ctest that catches it
A change of the sources that moves the lines of a patch breaks it; make the patch again (CONTRIBUTING.md).

  scripts/planted_bugs.py --check                              every patch applies (no build; CI does this)
  scripts/planted_bugs.py                                      builds and runs all that this machine can
  scripts/planted_bugs.py --only 'norm|router' --json planted.json
The copy and its build stay in --work. Exit status 0 if every bug is caught, 1 if one is not, or a patch does not apply or build.
"""

import filecmp
import glob
import os
import re
import shutil
import subprocess
import sys
import time

import jobs
from jobs import ROOT

HEADER = re.compile(r"(plants|family|test): (.+)")


def registry(only):
    bugs = []
    for path in sorted(glob.glob(f"{ROOT}/tests/planted/*.patch")):
        name = os.path.basename(path)[:-len(".patch")]
        with open(path) as file:
            head = dict(match.groups() for match in map(HEADER.match, file.read().split("diff --git")[0].splitlines()) if match)
        missing = {"plants", "family", "test"} - set(head)
        if missing:
            sys.exit(f"{path}: its first lines lack {', '.join(sorted(missing))}")
        if re.search(only, f"{name} {head['family']}"):
            bugs.append({"name": name, "path": path, **head})
    return bugs


def run(line, folder, **more):
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, **more)


def check(bugs):
    wrong = {bug["name"]: done.stderr for bug in bugs if (done := run(["git", "apply", "--check", bug["path"]], ROOT)).returncode != 0}
    for name, why in wrong.items():
        print(f"{name}: does not apply:\n{why}")
    print(f"{len(bugs) - len(wrong)} of {len(bugs)} patches apply")
    return 1 if wrong else 0


class Copy:
    """The sources elsewhere, as they are here, and their build."""

    def __init__(self, options):
        self.options, self.folder = options, os.path.abspath(options.work)
        os.makedirs(self.folder, exist_ok=True)
        files = run(["git", "ls-files", "-co", "--exclude-standard"], ROOT).stdout.splitlines()
        for name in files:
            source, target = f"{ROOT}/{name}", f"{self.folder}/{name}"
            if os.path.isfile(source) and not (os.path.exists(target) and filecmp.cmp(source, target, shallow=False)):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy(source, target)
        deps = os.environ.get("FP8FLOW_DEPS") or f"{ROOT}/.deps"
        done = run(["bash", "-c", f"source scripts/common.sh; configure {options.preset}"], self.folder,
                   env={**os.environ, **({"FP8FLOW_DEPS": deps} if os.path.isdir(deps) else {})})
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)

    def build(self, test):
        """The program of a test and what it starts; returns what went wrong."""
        program = re.sub(r"^(mpi_.*|gpu_mpi_.*)_\d$", r"\1", test)
        targets = [program] + (["fp8flow"] if test.startswith("cli") else [])
        done = run(["ninja", "-C", f"build/{self.options.preset}", *targets], self.folder)
        return "" if done.returncode == 0 else done.stdout[-2000:]

    def test(self, test):
        """caught, NOT caught, or why it could not run."""
        done = run(["ctest", "--test-dir", f"build/{self.options.preset}", "-R", f"^{test}(([._].*)?_\\d)?$", "--timeout", "180"], self.folder)
        if "No tests were found" in done.stdout + done.stderr:
            return "no such test"
        if "***Skipped" in done.stdout:
            return "skipped: no device"
        return "NOT caught" if done.returncode == 0 else "caught"

    def plant(self, bug):
        if bug["family"].startswith("hopper") and not shutil.which("nvidia-smi"):
            return "skipped: no device"
        if run(["git", "apply", bug["path"]], self.folder).returncode != 0:
            return "does not apply"
        try:
            return "does not build" if self.build(bug["test"]) else self.test(bug["test"])
        finally:
            run(["git", "apply", "-R", bug["path"]], self.folder)


def main():
    parser = jobs.command_line(__doc__)
    parser.add_argument("--check", action="store_true", help="only whether the patches apply")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="names or families that match")
    parser.add_argument("--work", default=f"{ROOT}/build/planted", help="folder of the copy")
    parser.add_argument("--preset", default="cuda-release" if shutil.which("nvidia-smi") else "cpu")
    parser.add_argument("--json", help="the report goes there")
    options = parser.parse_args()
    bugs = registry(options.only)
    if options.list:
        print("\n".join(f"{bug['name']:<40} {bug['family']:<16} {bug['test']:<28} {bug['plants']}" for bug in bugs))
        return 0
    if options.check:
        return check(bugs)

    began, copy, results = time.time(), Copy(options), []
    for bug in bugs:
        started = time.time()
        result = {"result": copy.plant(bug), "seconds": round(time.time() - started, 1)}
        results.append({name: bug[name] for name in ("name", "family", "plants", "test")} | result)
        print(f"[{len(results)}/{len(bugs)}] {bug['name']:<40} {bug['test']:<28} {result['seconds']:6.1f} s  {result['result']}", flush=True)
    caught, skipped = (sum(r["result"].startswith(word) for r in results) for word in ("caught", "skipped"))
    print(f"\n{caught} of {len(results) - skipped} caught, {skipped} need a GPU, {time.time() - began:.0f} s")
    if options.json:
        jobs.write_json(options.json, {**jobs.origin(), "caught": caught, "of": len(results) - skipped, "need a GPU": skipped, "bugs": results})
    return 0 if caught + skipped == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
