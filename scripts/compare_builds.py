#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares two builds of the program: their speed, or their machine code.

  scripts/compare_builds.py speed ../before/build/cuda-release/fp8flow build/cuda-release/fp8flow -- --suite gemm
  scripts/compare_builds.py speed OLD NEW --turns 3 --json docs/results/NAME.json -- --suite upstream --match '^rms_norm'
  scripts/compare_builds.py code OLD NEW      objects (.cu.o), archives (libfp8flow_hopper.a) or programs

speed benchmarks them alternately on one machine: old, new, old, new. A row is slower where the best of the new turns is more than --most times
the best of the old ones, and more than the old turns differ among themselves. Burst and sustained times are held to it. What follows -- goes
to `fp8flow bench` of both. The report is written after every turn, so an end by force keeps what was measured. Exit status 0 if no row is
slower, 1 if one is, 2 for bad input, and that of bench where a turn fails.

code compares the machine code (SASS) kernel by kernel, whatever the kernels are called: for moves and renames. Names of functions and symbols
are left out, so that a namespace or a folder may change; everything else of a function's listing counts. Prints the kernels of each side that
have no equal on the other, by demangled name and number of lines. Exit status: 0 equal, 1 not, 2 usage. Needs cuobjdump and c++filt. Registers
and shared memory: cuobjdump -res-usage.
"""

import collections
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import jobs


# ---- speed
TIMES = {"burst": "us", "sustained": "us_sustained"}


def bench(program, arguments, folder):
    """The rows of one run of bench, by operation and shape."""
    command = [program, "bench", *arguments, "--out", folder, "--overwrite"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"{shlex.join(command)}: exit status {done.returncode}\n{done.stderr.strip()}", file=sys.stderr)
        sys.exit(done.returncode if done.returncode > 0 else 70)
    with open(os.path.join(folder, "bench.json")) as file:
        return {f"{row['op']} {row['shape']}": row for row in json.load(file)}


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


def speed(options):
    for program in (options.old, options.new):
        if not os.access(program, os.X_OK) or os.path.isdir(program):
            options.error(f"{program}: not a program")
    if options.turns < 1:
        options.error(f"--turns: got {options.turns}, want at least 1")

    report = {**jobs.origin(), "gpu": None, "gpus": None, "most": options.most, "runs": []}
    del report["commit"]  # each run has its own
    with tempfile.TemporaryDirectory(prefix="compare_builds") as folder:
        for turn in range(2 * options.turns):
            which = ("old", "new")[turn % 2]
            rows = bench(os.path.abspath(getattr(options, which)), options.bench, folder)
            first = next(iter(rows.values()), None) or options.error("bench measured nothing")
            report.update(gpu=first["gpu"] or first["machine"]["cpu"], gpus=first["gpus"])
            report["runs"].append({"program": which, "commit": first["commit"], "rows": {
                name: {regime: round(row[key], 3) for regime, key in TIMES.items() if row.get(key)} for name, row in rows.items()}})
            print(f"turn {turn + 1} of {2 * options.turns}: {which}, commit {first['commit']}, {len(rows)} rows", flush=True)
            if options.json:
                jobs.write_json(options.json, report)

    rows = compared(report["runs"], options.most)
    if not rows:
        options.error("no row was measured by both programs")
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


# ---- code
HEADER = re.compile(r"\s*(Fatbin|=====|arch\b|code version|host\b|compile_size|compressed|identifier|producer|\.headerflags|member\b)")


def kernels(path):
    """Of a file, the kernels by the digest of their listing: {digest: [(name, lines)]}."""
    found = collections.defaultdict(list)
    for listing in re.split(r"\n\s*Function : ", jobs.run(["cuobjdump", "-sass", path]))[1:]:
        name, *lines = listing.split("\n")
        body = [" ".join(re.sub(r"`\(\S+?\)", "`()", line).split()) for line in lines if line.strip() and not HEADER.match(line)]
        found[hashlib.sha1("\n".join(body).encode()).hexdigest()].append((name, len(body)))
    return found


def without_equal(these, others):
    return [kernel for digest, found in these.items() for kernel in found[len(others.get(digest, [])):]]


def code(options):
    os.environ["PATH"] += os.pathsep + "/usr/local/cuda/bin"  # where the toolkit's installers put it
    for tool in ("cuobjdump", "c++filt"):
        if shutil.which(tool) is None:
            options.error(f"{tool} is not on PATH")
    old, new = kernels(options.old), kernels(options.new)
    if not old or not new:
        options.error(f"no kernels in {options.new if old else options.old}")
    alone = {"before": without_equal(old, new), "after": without_equal(new, old)}
    before, after = (sum(map(len, side.values())) for side in (old, new))
    print(f"{before} kernels before, {after} after: {len(alone['before'])} before without an equal after, "
          f"{len(alone['after'])} after without an equal before")
    for side, found in alone.items():
        for name, lines in found:
            print(f"{side}: {lines:6d} lines  {jobs.run(['c++filt', name.strip()]).strip()}")
    return 1 if any(alone.values()) else 0


def main():
    parser = jobs.command_line(__doc__)
    of_speed, of_code = jobs.commands(parser, speed, code)
    for command in (of_speed, of_code):
        command.add_argument("old")
        command.add_argument("new")
    of_speed.add_argument("--turns", type=int, default=2, help="of each program")
    of_speed.add_argument("--most", type=float, default=1.01, help="new / old from which a row is slower")
    of_speed.add_argument("--json", help="the report goes there")
    own, bench_arguments = sys.argv[1:], []
    if "--" in own:
        own, bench_arguments = own[:own.index("--")], own[own.index("--") + 1:]
    options = parser.parse_args(own)
    if bench_arguments and options.action is not speed:
        options.error(f"unrecognized arguments: {shlex.join(bench_arguments)}")
    options.bench = bench_arguments
    return options.action(options)


if __name__ == "__main__":
    sys.exit(main())
