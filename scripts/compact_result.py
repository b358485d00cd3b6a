#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes results of `profile` and `bench` small enough to be kept: no values by step, numbers to six digits, one line per row.

  scripts/compact_result.py runs/a/profile.json docs/results/profile_a.json [--keep stages|arms|times]

--keep arms leaves out the rows by stage; --keep times leaves out everything of an arm but the times of layer and step, which is what
`plan --check` compares. Medians, spread, conditions, commit and command stay, and so does the form: whatever reads profile.json reads
the compact file.
"""
import argparse
import json
import pathlib


TIMES = ["name", "recipe", "layer seconds", "layer clock hertz", "step seconds"]
DROPPED = ["share", "bytes per second", "flops per second", "ceiling share", "flops", "casts", "memory in use"]  # of a stage row


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items() if not key.endswith("by step")}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        short = float(f"{value:.6g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    return value


def compact(result, keep="stages"):
    """The text of a compact profile.json or bench.json."""
    profile = rounded(result)
    line = lambda value: json.dumps(value, separators=(",", ":"))
    if isinstance(profile, list):  # of bench: null, and 0 FLOPs or bytes, say nothing
        rows = [{key: value for key, value in row.items() if value is not None and (value != 0 or value is False)} for row in profile]
        return "[\n " + ",\n ".join(map(line, rows)) + "]\n"
    arms = []
    for arm in profile.pop("recipes"):
        rows = arm.pop("rows")
        rows = [{key: value for key, value in row.items() if key not in DROPPED} for row in rows] if keep == "stages" else []
        if keep == "times":
            arm = {key: arm[key] for key in TIMES if key in arm}
        arms.append(line(arm)[:-1] + ',"rows":[' + ",\n  ".join(map(line, rows)) + "]}")
    return line(profile)[:-1] + ',\n"recipes":[\n ' + ",\n ".join(arms) + "]}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--keep", choices=["stages", "arms", "times"], default="stages")
    args = parser.parse_args()
    args.result.write_text(compact(json.loads(args.source.read_text()), args.keep))


if __name__ == "__main__":
    main()
