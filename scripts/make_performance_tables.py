#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the tables of docs/performance.md and docs/performance/ from the files in docs/results, and the picture
docs/pictures/deepseek_v3_layer.svg. Python's standard library only. The tables themselves: performance_tables.

A page marks a table's place by `<!-- table NAME -->` and `<!-- end NAME -->`; what is between them is replaced. Any page of docs/
and README.md may have such marks. With --check nothing is written: the exit status is 1 where a page or the picture differs from what the
results say, or where a page asks for a table that does not exist.
"""
import argparse
import os
import re
import sys

from performance_tables import kernels, layers, loss, picture
from performance_tables.common import RESULTS, ROOT

NEEDED = [ROOT / "docs" / "performance.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))]  # pages that must have tables
PAGES = NEEDED + sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - set(NEEDED))


TABLES = {**layers.TABLES, **kernels.TABLES, **loss.TABLES}
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs from the results")
    check = parser.parse_args().check
    wanted = {page: filled(page.read_text(), page.relative_to(ROOT)) for page in PAGES}
    wanted[picture.PICTURE] = picture.picture()
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
