#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Profiler metrics of the kernels of `fp8flow bench` rows: one cold call of each row under Nsight Compute (ncu), one line a kernel.

  scripts/kernel_profile.py --suite upstream --match '^cross_entropy '
  scripts/kernel_profile.py --json kernels.json rms_norm_backward --shape T=4096,H=7168
Everything that is not an option of this script goes to `fp8flow bench --capture`. Clocks are left as they are, caches are flushed before a
kernel; a kernel runs several times, alone, so its time is a little longer than in the bench. Columns:
  us          duration
  DRAM MB     read + written
  DRAM, L2, L1  busy, of their peak over the kernel's time;  hit: of the L2's sectors
  issue       clocks in which a scheduler issued, of those with a warp on the SM;  tensor: tensor cores busy, likewise
  SMs         clocks with a warp on the SM, of the kernel's: mean and least (start, end, balance)
  warps       on an SM, mean;  regs: a thread
  waits       what warps wait for, by share of their time: the three largest
Exit status: ncu's, 1 if it recorded nothing.
"""

import argparse
import csv
import io
import os
import re
import subprocess
import sys
import tempfile

from jobs import ROOT, write_json

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = {  # ncu's name: ours
    "long_scoreboard": "memory or L2", "short_scoreboard": "shared memory or special functions", "barrier": "barrier", "membar": "memory barrier",
    "mio_throttle": "shared-memory queue", "lg_throttle": "memory queue", "wait": "fixed latency", "math_pipe_throttle": "arithmetic busy",
    "gmma": "tensor cores", "sleeping": "sleeping", "no_instruction": "instruction fetch", "branch_resolving": "branch", "drain": "stores at exit",
    "dispatch_stall": "dispatch", "not_selected": "other warps chosen", "selected": "issuing", "imc_miss": "constants", "misc": "other",
    "tex_throttle": "texture queue",
}
METRICS = {
    "us": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "hit": "lts__t_sector_hit_rate.pct",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "active": "sm__cycles_active.avg", "least": "sm__cycles_active.min", "cycles": "sm__cycles_elapsed.max",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
}
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def profile(options, arguments):
    wanted = list(METRICS.values()) + [STALL.format(reason) for reason in REASONS]
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "ncu.csv")
        line = [options.ncu, "--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(wanted), "--csv", "--page", "raw",
                "--print-units", "base", "--log-file", log, options.fp8flow, "bench", "--capture", *arguments]
        # A program that starts itself again (docs/operations.md, OMP_WAIT_POLICY) would be lost to some profilers.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        said = open(log).read() if os.path.exists(log) else ""
    if done.returncode != 0 or '"ID"' not in said:
        sys.stderr.write(done.stdout + said)
        sys.exit(done.returncode or 1)
    counted = re.findall(r"^captured (\d+) kernels of (.*)$", done.stdout, re.MULTILINE)
    return list(csv.reader(io.StringIO(said[said.index('"ID"'):]))), [row for count, row in counted for _ in range(int(count))]


def number(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def kernels_of(table, sources):
    """One dictionary a kernel, from ncu's table (names, units, then a line a kernel) and the bench row of each."""
    names, units = table[0], table[1]
    if len(sources) != len(table) - 2:
        sys.exit(f"error: ncu recorded {len(table) - 2} kernels, the rows have {len(sources)}: some are not this program's (cuBLASLt?), or not counted")
    rows = []
    for line, source in zip(table[2:], sources):
        cell = dict(zip(names, line))
        unit = dict(zip(names, units))
        get = lambda metric: None if number(cell.get(metric, "")) is None else number(cell[metric]) * UNITS.get(unit[metric], 1)
        row = {key: get(metric) for key, metric in METRICS.items()}
        row["row"] = source
        row["kernel"] = re.sub(r"^void |(fp8flow::)?hopper::|\(anonymous namespace\)::|<?unnamed>::|\(.*$", "", cell["Kernel Name"])
        row["grid"], row["block"] = cell.get("Grid Size", ""), cell.get("Block Size", "")
        stalls = {name: get(STALL.format(reason)) or 0.0 for reason, name in REASONS.items()}
        total = sum(stalls.values()) or 1.0
        row["waits"] = {name: value / total for name, value in sorted(stalls.items(), key=lambda item: -item[1]) if value > 0.005 * total}
        rows.append(row)
    return rows


def percent(value):
    return "-" if value is None else f"{value:.0f} %"


def text_of(rows):
    head = ["row", "kernel", "us", "DRAM MB", "DRAM", "L2", "hit", "L1", "issue", "tensor", "SMs", "warps", "regs", "waits"]
    lines, last = [head], None
    for row in rows:
        share = lambda key: None if not row["cycles"] or row[key] is None else 100 * row[key] / row["cycles"]
        waits = [f"{name} {100 * part:.0f}" for name, part in row["waits"].items() if name != "issuing"][:3]
        moved = None if row["read"] is None or row["written"] is None else (row["read"] + row["written"]) * 1e-6
        lines.append(["" if row["row"] == last else row["row"], row["kernel"][:60], f"{row['us']:.1f}", "-" if moved is None else f"{moved:.0f}",
                      percent(row["dram"]), percent(row["l2"]), percent(row["hit"]), percent(row["l1"]), percent(row["issue"]), percent(row["tensor"]),
                      f"{percent(share('active'))}, {percent(share('least'))}", "-" if row["warps"] is None else f"{row['warps']:.0f}",
                      f"{row['registers'] or 0:.0f}", ", ".join(waits)])
        last = row["row"]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = {0, 1, len(head) - 1}
    return "\n".join("  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
                     for line in lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8flow", default=os.path.join(ROOT, "build/cuda-release/fp8flow"), help="the program (default: build/cuda-release/fp8flow)")
    parser.add_argument("--ncu", default="ncu", help="the profiler (default: ncu)")
    parser.add_argument("--json", help="also write everything to this file")
    options, arguments = parser.parse_known_args()
    if not arguments:
        parser.error("name operations, or a --suite and --match, as for fp8flow bench")
    with open(os.path.join(ROOT, "model/commands/main.cpp")) as file:
        known = file.read()
    for argument in arguments:  # before the profiler starts the program, which would say less
        if argument.startswith("-") and f'"{argument.split("=")[0]}"' not in known:
            parser.error(f"unrecognized arguments: {argument}")
    rows = kernels_of(*profile(options, arguments))
    print(text_of(rows), end="")
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
