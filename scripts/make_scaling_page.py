#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the tables of docs/scaling.md from what `fp8flow plan` prints.

A page marks a table's place by `<!-- plan`, lines `LABEL: ARGUMENTS` and `-->`, and its end by `<!-- plan ends -->`; what is
between them is replaced by one table with a row for each row of `fp8flow plan ARGUMENTS --markdown`, the label in front.
With --check nothing is written: the exit status is 1 where the page differs from what the program says.
"""
import argparse
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scaling.md"
MARK = re.compile(r"(<!-- plan\n(.*?)-->\n)(.*?)(<!-- plan ends -->)", re.DOTALL)


def rows_of(program, arguments):
    """Header and rows of one plan, as lists of cells."""
    command = [program, "plan", *shlex.split(arguments), "--markdown"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if run.returncode != 0:
        sys.exit(f"{shlex.join(command)}: {run.stderr.strip()}")
    lines = [line for line in run.stdout.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0], cells[2:]


def table_of(program, runs):
    header, table = None, []
    for run in runs.strip().splitlines():
        label, arguments = run.split(":", 1)
        names, rows = rows_of(program, arguments)
        if header is None:
            header = ["model" if label else "", *names]
        for row in rows:  # a run inside a host has no column of the rows between hosts
            cells = dict(zip(names, row))
            table.append([label.strip(), *(cells.get(name, "-") for name in header[1:])])
    rule = ["---"] + ["---:" if name not in ("recipe", "fits", "basis") else "---" for name in header[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *table]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default=str(ROOT / "build" / "cpu" / "fp8flow"))
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where the page differs")
    options = parser.parse_args()
    old = PAGE.read_text()
    new = MARK.sub(lambda m: m.group(1) + "\n" + table_of(options.program, m.group(2)) + "\n" + m.group(4), old)
    if options.check:
        if new != old:
            sys.exit("docs/scaling.md is not what the program says: scripts/make_scaling_page.py")
    elif new != old:
        PAGE.write_text(new)


if __name__ == "__main__":
    main()
