#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Two builds of the program, benchmarked alternately on one machine: old, new, old, new. A row is slower where the best of the new turns is more
than --most times the best of the old ones, and more than the old turns differ among themselves. Burst and sustained times are held to it.

  scripts/compare_speed.py ../before/build/cuda-release/fp8flow build/cuda-release/fp8flow -- --suite gemm
  scripts/compare_speed.py OLD NEW --turns 3 --json docs/results/NAME.json -- --suite upstream --match '^rms_norm'

What follows -- goes to `fp8flow bench` of both. The report is written after every turn, so an end by force keeps what was measured.
Exit status 0 if no row is slower, 1 if one is, 2 for bad input, and that of bench where a turn fails.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile

TIMES = {"burst": "us", "sustained": "us_sustained"}


def bench(program, arguments, folder):
    """The rows of one run of bench, by operation and shape."""
    command = [program, "bench", *arguments, "--out", folder, "--overwrite"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"{shlex.join(command)}: exit status {done.returncode}\n{done.stderr.strip()}", file=sys.stderr)
        sys.exit(done.returncode if done.returncode > 0 else 70)
    with open(os.path.join(folder, "bench.json")) as file:
        rows = {f"{row['op']} {row['shape']}": row for row in json.load(file)}
    if not rows:
        print(f"{shlex.join(command)}: measured nothing", file=sys.stderr)
        sys.exit(70)
    return rows


def compared(turns, most):
    """[(row, regime, [us of old turns], [us of new turns], slower)], the largest ratio first."""
    old, new = ([turn["rows"] for turn in turns if turn["program"] == which] for which in ("old", "new"))
    found = []
    for name in old[0]:
        for regime in TIMES:
            before, after = ([rows[name][regime] for rows in side if rows.get(name, {}).get(regime)] for side in (old, new))
            if before and after:
                ratio, spread = min(after) / min(before), max(before) / min(before)
                found.append((name, regime, before, after, ratio > max(most, spread)))
    return sorted(found, key=lambda row: -min(row[3]) / min(row[2]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--turns", type=int, default=2, help="of each program")
    parser.add_argument("--most", type=float, default=1.01, help="new / old from which a row is slower")
    parser.add_argument("--json", help="the report goes there")
    own = sys.argv[1:]
    of_bench = []
    if "--" in own:
        own, of_bench = own[:own.index("--")], own[own.index("--") + 1:]
    options = parser.parse_args(own)
    for program in (options.old, options.new):
        if not os.access(program, os.X_OK) or os.path.isdir(program):
            parser.error(f"{program}: not a program")
    if options.turns < 1:
        parser.error(f"--turns: got {options.turns}, want at least 1")

    report = {"gpu": None, "gpus": None, "date": datetime.date.today().isoformat(),
              "command": shlex.join(["scripts/compare_speed.py", *sys.argv[1:]]), "most": options.most, "runs": []}
    with tempfile.TemporaryDirectory(prefix="compare_speed") as folder:
        for turn in range(2 * options.turns):
            which = ("old", "new")[turn % 2]
            rows = bench(os.path.abspath(getattr(options, which)), of_bench, folder)
            first = next(iter(rows.values()))
            report.update(gpu=first["gpu"] or first["machine"]["cpu"], gpus=first["gpus"])
            report["runs"].append({"program": which, "commit": first["commit"], "rows": {
                name: {regime: round(row[key], 3) for regime, key in TIMES.items() if row.get(key)} for name, row in rows.items()}})
            print(f"turn {turn + 1} of {2 * options.turns}: {which}, commit {first['commit']}, {len(rows)} rows", flush=True)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(report, file, indent=1)
                    file.write("\n")

    rows = compared(report["runs"], options.most)
    if not rows:
        parser.error("no row was measured by both programs")
    print(f"{'new / old':>9}  {'old, us':>20}  {'new, us':>20}  row")
    for name, regime, before, after, slower in rows:
        print(f"{min(after) / min(before):9.3f}  {' '.join(f'{us:.2f}' for us in before):>20}  {' '.join(f'{us:.2f}' for us in after):>20}  "
              f"{name} {'' if regime == 'burst' else regime}{'  SLOWER' if slower else ''}")
    count = sum(row[4] for row in rows)
    alone = set(report["runs"][0]["rows"]) ^ set(report["runs"][1]["rows"])
    if alone:
        print(f"{len(alone)} rows are of one program alone")
    print(f"{len(rows)} rows, {count} slower than {options.most} x and than the old turns differ")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
