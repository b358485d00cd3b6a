#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks that every file in docs/results says where it comes from (commit, command, date, machine), that a page cites it, and that the
folder stays small. Python's standard library only.

Forms: a .json is an object, a list of objects, or an object whose `runs` are objects that inherit what they lack. Each has
  commit   seven hexadecimal digits or more
  command  the command line
  date     begins with YYYY-MM-DD
  machine  `gpu` (a name), or `machine` (a text, or an object as commands write it, or with `device`)
A .txt names a commit and a date; a .txt that prints a .json has the same name as that .json. A result without a
control arm has no noise floor: null, never 0. EXCEPTIONS lists the files that cannot say so and why; a new file cannot join it
silently, and an exception that is no longer needed is an error too.

--history also asks git whether each commit exists (needs the whole history).
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"

EXCEPTIONS = {
}
MOST_FILES, MOST_BYTES = 70, 1_500_000
COMMIT = re.compile(r"[0-9a-f]{7,40}$")
DATE = re.compile(r"20\d\d-[01]\d-[0-3]\d")


def machine_of(item):
    machine = item.get("gpu") or item.get("machine")
    if not isinstance(machine, dict):
        return machine
    if machine.get("gpus"):  # as commands write it
        return machine["gpu"] if machine["gpus"] == 1 else f"{machine['gpus']} x {machine['gpu']}"
    return machine.get("device") or machine.get("cpu")


def problems_of_item(item):
    problems = []
    if not (isinstance(item.get("commit"), str) and COMMIT.match(item["commit"])):
        problems.append("no commit")
    if not (isinstance(item.get("command"), str) and item["command"].strip()):
        problems.append("no command")
    if not (isinstance(item.get("date"), str) and DATE.match(item["date"])):
        problems.append("no date")
    if not (isinstance(machine_of(item), str) and machine_of(item).strip()):
        problems.append("no machine")
    return problems


def items_of(data):
    if isinstance(data, list):
        return data
    if "runs" in data:
        return [{**{key: value for key, value in data.items() if key != "runs"}, **run} for run in data["runs"]]
    return [data]


def problems_of_json(path):
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        return [f"not JSON: {error}"]
    items = items_of(data)
    problems = [] if items else ["empty"]
    for i, item in enumerate(items):
        where = f"entry {i}: " if len(items) > 1 else ""
        problems += [where + problem for problem in problems_of_item(item)]
        if "noise floor" in item and not any(arm.get("verdict") == "noise floor" for arm in item.get("arms", [])):
            if item["noise floor"] is not None:
                problems.append(where + "a noise floor without a control arm")
    return problems


def problems_of_text(path):
    text = path.read_text()
    if path.with_suffix(".json").exists() and path.stem.startswith("bench_"):
        return []
    problems = []
    if not re.search(r"\bcommits?:? [0-9a-f]{7}\b", text):
        problems.append("no commit")
    if not DATE.search(text):
        problems.append("no date")
    return problems


def problems_of(path):
    if path.suffix == ".json":
        return problems_of_json(path)
    if path.suffix == ".jsonl":
        return sorted({p for line in path.read_text().splitlines() for p in problems_of_item(json.loads(line))})
    if path.suffix == ".txt":
        return problems_of_text(path)
    return ["neither .json, .jsonl nor .txt"]


def commits():
    for path in sorted(RESULTS.glob("*.json")):
        for item in items_of(json.loads(path.read_text())):
            yield path.name, item.get("commit")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", action="store_true")
    history = parser.parse_args().history
    wrong = 0
    files = [path for path in sorted(RESULTS.iterdir()) if path.name != "README.md"]
    for path in files:
        problems = problems_of(path)
        if path.name in EXCEPTIONS:
            if not problems:
                wrong += 1
                print(f"docs/results/{path.name}: says everything now; remove it from EXCEPTIONS", file=sys.stderr)
            continue
        for problem in problems[:5]:
            wrong += 1
            print(f"docs/results/{path.name}: {problem}", file=sys.stderr)
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for path in files:
        if path.name not in pages:
            wrong += 1
            print(f"docs/results/{path.name}: no page cites it", file=sys.stderr)
    size = sum(path.stat().st_size for path in files)
    if len(files) > MOST_FILES or size > MOST_BYTES:
        wrong += 1
        print(f"docs/results: {len(files)} files of {size} bytes, want at most {MOST_FILES} and {MOST_BYTES}; scripts/compact_result.py", file=sys.stderr)
    for name in sorted(set(EXCEPTIONS) - {path.name for path in files}):
        wrong += 1
        print(f"EXCEPTIONS names {name}, which does not exist", file=sys.stderr)
    if history:
        for name, commit in sorted(set(commits())):
            if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{commit}^{{commit}}"], check=False,
                              stderr=subprocess.DEVNULL).returncode != 0:
                wrong += 1
                print(f"docs/results/{name}: commit {commit} is not in this repository", file=sys.stderr)
    print(f"{len(files)} files in docs/results, {len(EXCEPTIONS)} exception{'s' if len(EXCEPTIONS) != 1 else ''}, {wrong} problem{'s' if wrong != 1 else ''}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
