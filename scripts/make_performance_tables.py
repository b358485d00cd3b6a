#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the tables of docs/performance.md, docs/performance/ and docs/results/README.md from the files in docs/results, and the picture
docs/pictures/deepseek_v3_layer.svg. Python's standard library only. The tables themselves: performance_tables.py.

A page marks a table's place by `<!-- table NAME -->` and `<!-- end NAME -->`; what is between them is replaced. Any page of docs/
and README.md may have such marks. With --check nothing is written: the exit status is 1 where a page or the picture differs from what the
results say, or where a page asks for a table that does not exist.

docs/scaling.md has `<!-- plan`, lines `LABEL: ARGUMENTS`, `-->` and `<!-- plan ends -->`; --plan PROGRAM replaces what is between by the rows of
`PROGRAM plan ARGUMENTS --markdown`, the label in front.
"""
import argparse
import os
import re
import shlex
import subprocess
import sys

from performance_tables import PICTURE, RESULTS, ROOT, TABLES, picture

NEEDED = [ROOT / "docs" / "performance.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))]  # pages that must have tables
PAGES = NEEDED + sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - set(NEEDED))
PLAN = re.compile(r"(<!-- plan\n(.*?)-->\n)(.*?)(<!-- plan ends -->)", re.DOTALL)
MARK = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end \1 -->", re.S)


def filled(text, page):
    opened, closed = re.findall(r"<!-- table (\w+) -->", text), re.findall(r"<!-- end (\w+) -->", text)
    if opened != closed:
        sys.exit(f"{page}: marks do not pair: {opened} and {closed}")
    unknown = [name for name in opened if name not in TABLES]
    if unknown:
        sys.exit(f"{page}: no such table: {', '.join(unknown)}; there are {', '.join(TABLES)}")
    to_results = os.path.relpath(RESULTS, (ROOT / page).parent)

    def made(match):
        body = TABLES[match[1]]().replace("](results/", f"]({to_results}/")
        return f"<!-- table {match[1]} -->\n{body}\n<!-- end {match[1]} -->"
    return MARK.sub(made, text)


def plan_rows(program, arguments):
    """Header and rows of one plan, as lists of cells."""
    command = [program, "plan", *shlex.split(arguments), "--markdown"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if run.returncode != 0:
        sys.exit(f"{shlex.join(command)}: {run.stderr.strip()}")
    lines = [line for line in run.stdout.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0], cells[2:]


def plan_table(program, runs):
    header, table = None, []
    for run in runs.strip().splitlines():
        label, arguments = run.split(":", 1)
        names, rows = plan_rows(program, arguments)
        if header is None:
            header = ["model" if label else "", *names]
        for row in rows:  # a run inside a host has no column of the rows between hosts
            cells = dict(zip(names, row))
            table.append([label.strip(), *(cells.get(name, "-") for name in header[1:])])
    rule = ["---"] + ["---:" if name not in ("recipe", "fits", "basis") else "---" for name in header[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *table]) + "\n"


def planned(program, text):
    """A page with the tables that `fp8flow plan` prints."""
    return PLAN.sub(lambda mark: f"{mark[1]}\n{plan_table(program, mark[2])}\n{mark[4]}", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs from the results")
    parser.add_argument("--plan", metavar="PROGRAM", help="instead: the tables of docs/scaling.md, from what `PROGRAM plan` prints")
    options = parser.parse_args()
    check = options.check
    if options.plan:
        page = ROOT / "docs" / "scaling.md"
        wanted = planned(options.plan, page.read_text())
        if check and wanted != page.read_text():
            sys.exit("docs/scaling.md differs from what the program prints; run scripts/make_performance_tables.py --plan PROGRAM")
        page.write_text(wanted)
        return
    wanted = {page: filled(page.read_text(), page.relative_to(ROOT)) for page in PAGES}
    wanted[PICTURE] = picture()
    used = "".join(page.read_text() for page in PAGES)
    for page in NEEDED:
        if "<!-- table " not in page.read_text():
            sys.exit(f"{page.relative_to(ROOT)}: no table is marked")
    different = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in different:
        if check:
            print(f"{path.relative_to(ROOT)} differs from docs/results; run scripts/make_performance_tables.py", file=sys.stderr)
        else:
            path.write_text(wanted[path])
            print(f"wrote {path.relative_to(ROOT)}")
    if check:
        print(f"{len(wanted) - len(different)} of {len(wanted)} files agree with docs/results, "
              f"{len(re.findall('<!-- table ', used))} tables")
    sys.exit(1 if check and different else 0)


if __name__ == "__main__":
    main()
