#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Figures of scale_check.sh: one line of JSON of a result, or the table of its bars.

Usage: scale_figures.py PROFILE_JSON | BENCH_JSON | FOLDER_OF_TRAIN     {"arm": {"ms": ..., "MHz": ...}, ...}; nothing where there is no file
       scale_figures.py --bars SCALE_CHECK_JSON                         bar, measured, held or missed

Times are of a layer, forward and backward, medians over the measured steps of the slowest rank; `passes` are those of all micro-batches and
layers of a step, `without rows` the same while dispatch and combine move nothing. A bar whose check did not run is "not run".
"""
import argparse
import json
import os


def arm_figures(arm):
    median = {key: arm[key]["median"] for key in ("layer seconds", "passes seconds") if arm.get(key)}
    passes = median.get("passes seconds") or median["layer seconds"]
    figures = {"ms": round(median["layer seconds"] * 1e3, 3), "passes ms": round(passes * 1e3, 3), "step ms": round(arm["step seconds"] * 1e3, 3)}
    if arm.get("layer clock hertz") and arm["layer clock hertz"]["median"] > 0:
        figures["MHz"] = round(arm["layer clock hertz"]["median"] / 1e6)
    if arm.get("wire seconds alone") is not None:
        figures["wire alone ms"] = round(arm["wire seconds alone"] * 1e3, 3)
    if arm.get("exposed wire seconds") is not None:
        figures["exposed ms"] = round(arm["exposed wire seconds"] * 1e3, 3)
    if arm.get("joules per token"):
        figures["mJ a token"] = round(arm["joules per token"] * 1e3, 3)
    return figures


def of_profile(result):
    return {arm["name"]: arm_figures(arm) for arm in result["recipes"]}


def of_bench(rows):
    """Shares of the ceiling of the plain FP8 rows, the least of the shapes."""
    figures = {}
    for op in ("dispatch", "combine"):
        shares = [row["ceiling_share"] for row in rows if row["op"] == op and " sms=0 peer=none" in row["shape"] and "dispatcher=flex" in row["shape"]
                  and "wire=fp8_casts" not in row["shape"] and row.get("ceiling_share")]
        if shares:
            figures[op] = {"least share": round(min(shares), 3), "largest share": round(max(shares), 3)}
    return figures


def of_training(folder):
    """Throughput of the steps after the second, and bytes beside those that plan states (FOLDER_plan/plan.json)."""
    with open(f"{folder}/metrics.jsonl") as file:
        steps = [row for row in map(json.loads, file) if row.get("type") == "step"]
    settled = steps[2:] or steps
    with open(f"{folder}/memory.json") as file:
        memory = json.load(file)
    used = memory["parameters, sum"] + memory["saved for backward, reserved"] + memory["workspace, reserved"]
    figures = {"iterations": len(steps), "tokens/s": round(sum(row["tokens_per_second"] for row in settled) / len(settled)),
               "TFLOP/s a GPU": round(sum(row["tflops_per_gpu"] for row in settled) / len(settled), 1), "GiB a GPU": round(used / 2**30, 2),
               "first loss": round(steps[0]["lm_loss"], 4), "last loss": round(steps[-1]["lm_loss"], 4)}
    plan = f"{folder}_plan/plan.json"
    if os.path.exists(plan):
        with open(plan) as file:
            figures["GiB a GPU by plan"] = round(json.load(file)["memory_bytes"]["total"] / 2**30, 2)
    return figures


def figures_of(path):
    if os.path.isdir(path):
        return of_training(path) if os.path.exists(f"{path}/metrics.jsonl") else None
    if not os.path.exists(path):
        return None
    with open(path) as file:
        result = json.load(file)
    return of_bench(result) if isinstance(result, list) else of_profile(result)


def at(figures):
    return f"{figures['passes ms']:.2f} ms" + (f" at {figures['MHz']} MHz" if "MHz" in figures else "")


def ratio_bar(name, arms, most, schedule="", aim=None):
    """The first arm, serial, and the fastest of the others whose names have `schedule`."""
    serial, *others = (arms or {"": None}).items()
    others = [other for other in others if schedule in other[0]]
    if not others:
        return name, "not run", ""
    serial = serial[1]
    arm, overlapped = min(others, key=lambda other: other[1]["passes ms"])
    ratio = overlapped["passes ms"] / serial["passes ms"]
    text = f"{arm}: {at(overlapped)} / {at(serial)} = {ratio:.3f}"
    if aim:
        text += f" (aim {aim} ms)"
    return name, text, "held" if ratio <= most else "missed"


def bars(check):
    found = {row["check"]: row.get("figures") or {} for row in check["checks"]}
    layer, micro = found.get("layer deepseek_v3"), found.get("layer deepseek_v3 micro-batches")
    yield ratio_bar("DeepSeek-V3 layer, 4096 tokens, overlapped / serial <= 0.89", layer, 0.89, aim=10.0)
    yield ratio_bar("the same, 8 micro-batches in turns / serial <= 0.87", micro, 0.87, "turns")
    exposed = [(arm["exposed ms"], name) for arms in (layer, micro) for name, arm in (arms or {}).items() if "exposed ms" in arm]
    name = "wire exposed <= 0.2 ms"
    yield (name, "{:.3f} ms: {}".format(*min(exposed)), "held" if min(exposed)[0] <= 0.2 else "missed") if exposed else (name, "not run", "")
    four, eight = found.get("layer deepseek_v3 on 4"), layer if check["gpus"] == 8 else None
    name = "EP 8 / EP 4, a layer <= 1.08"
    if four and eight:
        serial, of_four = (next(iter(arms.values())) for arms in (eight, four))
        ratio = serial["passes ms"] / of_four["passes ms"]
        yield name, f"{at(serial)} / {at(of_four)} = {ratio:.3f}", "held" if ratio <= 1.08 else "missed"
    else:
        yield name, "not run", ""
    for op in ("dispatch", "combine"):
        share = found.get("exchange", {}).get(op, {}).get("least share")
        yield (f"{op}, share of the store ceiling >= 0.85", f"{share:.3f}", "held" if share >= 0.85 else "missed") if share else (
            f"{op}, share of the store ceiling >= 0.85", "not run", "")
    whole, divided = found.get("state whole"), found.get("state divided overlapped") or found.get("state divided")
    name = "state divided / whole, a step <= 1.03"
    if whole and divided:
        ratio = divided["fp8_flow"]["step ms"] / whole["fp8_flow"]["step ms"]
        yield name, f"{divided['fp8_flow']['step ms']:.2f} / {whole['fp8_flow']['step ms']:.2f} ms = {ratio:.3f}", "held" if ratio <= 1.03 else "missed"
    else:
        yield name, "not run", ""
    model = found.get("train qwen3_30b_a3b") or {}
    name = "Qwen3-30B-A3B, memory / plan within 10 %"
    if "GiB a GPU by plan" in model:
        ratio = model["GiB a GPU"] / model["GiB a GPU by plan"]
        text = f"{model['GiB a GPU']} / {model['GiB a GPU by plan']} GiB = {ratio:.3f}; {model['tokens/s']} tokens/s, {model['TFLOP/s a GPU']} TFLOP/s a GPU"
        yield name, text, "held" if abs(ratio - 1) <= 0.1 else "missed"
    else:
        yield name, "not run", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", nargs="?")
    what.add_argument("--bars", metavar="FILE")
    options = parser.parse_args()
    if options.bars:
        with open(options.bars) as file:
            rows = list(bars(json.load(file)))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        for name, text, verdict in rows:
            print(f"{name:<{widths[0]}}  {text:<{widths[1]}}  {verdict}".rstrip())
    else:
        figures = figures_of(options.folder)
        if figures:
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
