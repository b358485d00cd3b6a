#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# Long because each table has its own columns: a short function a table, and what they share above.
"""Writes the tables of docs/performance.md and docs/results/README.md from the files in docs/results, and the picture
docs/pictures/deepseek_v3_layer.svg. Python's standard library only.

A page marks a table's place by `<!-- table NAME -->` and `<!-- end NAME -->`; what is between them is replaced. Any page of docs/
and README.md may have such marks. With --check nothing is written: the exit status is 1 where a page or the picture differs from what the
results say, or where a page asks for a table that does not exist.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import sys

import results_index

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PICTURE = ROOT / "docs" / "pictures" / "deepseek_v3_layer.svg"
NEEDED = [ROOT / "docs" / "performance.md", RESULTS / "README.md"]  # pages that must have tables
PAGES = NEEDED + sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - set(NEEDED))
RECIPES = ["bf16", "fp8_blockwise", "fp8_flow"]


def load(name):
    return json.loads((RESULTS / name).read_text())


def table(header, rows, align_from=1):
    """A Markdown table; columns from align_from on are numbers."""
    rule = ["---" if i < align_from else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in [header, rule, *rows])


def source(*parts):
    return "\n\nSource: " + "; ".join(parts) + "."


def link(name):
    return f"[{name}](results/{name})"  # `filled` makes it relative to the page


def origin(name):
    """Link, commit and command of a file whose rows or object carry one of each."""
    data = load(name)
    rows = data if isinstance(data, list) else [data]
    numbers = collections.Counter(row["commit"] for row in rows).most_common()
    commit = numbers[0][0] + "".join(f" ({count} of {len(rows)} rows: {other})" for other, count in numbers[1:])
    return f"{link(name)}, commit {commit}, {rows[0]['date'][:10]}, `{rows[0]['command']}`"


# ---- one MoE layer -------------------------------------------------------------------------------------------------------------
LAYERS = [
    ("DeepSeek-V3 dimensions, 32 experts", "profile_deepseek_v3_1gpu.json", 4096),
    ("Qwen3 dimensions, 32 experts", "profile_qwen3_1gpu.json", 8192),
    ("DeepSeek-V3, 256 experts", "profile_deepseek_v3.json", 4096),
    ("the same, another machine", "profile_deepseek_v3_machine2.json", 4096),
    ("DeepSeek-V3, 256 experts", "profile_deepseek_v3_8192.json", 8192),
    ("Qwen3-235B, 128 experts", "profile_qwen3_235b.json", 4096),
    ("Mixtral-8x7B, 8 experts", "profile_mixtral_8x7b.json", 4096),
]


def recipe_of(profile, name):
    return next(r for r in profile["recipes"] if r["name"] == name)


def layer_ms(recipe):
    return recipe["layer seconds"]["median"] * 1e3


def layer_rows(columns, files=LAYERS):
    rows = []
    for label, name, tokens in files:
        profile = load(name)
        arms = {recipe: recipe_of(profile, recipe) for recipe in RECIPES}
        flow = arms["fp8_flow"]
        saved = [sum(arms[r]["saved bytes"].values()) / 2**30 for r in ("bf16", "fp8_flow")]
        wire = [sum(arms[r]["wire bytes"].values()) / 2**20 for r in ("bf16", "fp8_flow")]
        tokens_measured = round(flow["tokens per second per gpu"] * flow["layer seconds"]["median"])
        assert tokens_measured == tokens, (name, tokens_measured)
        cells = {
            "layer": label, "tokens a GPU": tokens, "GPUs": profile["ranks"],
            **{r: f"{layer_ms(arms[r]):.2f} ms" for r in RECIPES},
            "clock": f"{flow['layer clock hertz']['median'] / 1e6:.0f} MHz",
            "bf16 / flow": f"{layer_ms(arms['bf16']) / layer_ms(flow):.2f}",
            "tokens/s/GPU": f"{flow['tokens per second per gpu'] / 1e3:.0f} k",
            "TFLOP/s/GPU": f"{flow['flops per second per gpu'] / 1e12:.0f}",
            "wire per GPU, bf16, flow": f"{wire[0]:.0f}, {wire[1]:.0f} MiB" if wire[0] else "",
            "saved, bf16, flow": f"{saved[0]:.2f}, {saved[1]:.2f} GiB",
            "file": link(name),
        }
        rows.append([cells[c] for c in columns])
    return rows


def layers():
    columns = ["layer", "tokens a GPU", "GPUs", *RECIPES, "clock", "bf16 / flow", "tokens/s/GPU", "TFLOP/s/GPU",
               "wire per GPU, bf16, flow", "saved, bf16, flow"]
    lines = [f"`{p['command']}`: {link(n)}, commit {p['commit']}, {p['date'][:10]}, {p['steps']} steps"
             for _, n, _ in LAYERS for p in [load(n)]]
    return table(columns, layer_rows(columns)) + "\n\nSources:\n" + "\n".join("- " + line for line in lines)


def layers_4gpu():
    columns = ["layer", "tokens a GPU", *RECIPES, "clock", "bf16 / flow", "tokens/s/GPU", "TFLOP/s/GPU", "wire per GPU, bf16, flow"]
    files = [("DeepSeek-V3, 256 experts", "profile_deepseek_v3_4gpu_recipes.json", 4096),
             ("Qwen3-235B, 128 experts", "profile_qwen3_235b_a22b_4gpu.json", 4096), ("Qwen3-30B, 128 experts", "profile_qwen3_30b_a3b_4gpu.json", 4096),
             ("Mixtral-8x7B, 8 experts", "profile_mixtral_8x7b_4gpu.json", 4096), ("DeepSeek-V2-Lite, 64 experts", "profile_deepseek_v2_lite_4gpu.json", 4096)]
    return table(columns, layer_rows(columns, files)) + source(*(origin(name) for _, name, _ in files))


def layers_short():
    """Four rows for the README."""
    columns = ["layer", "tokens a GPU", "GPUs", *RECIPES, "bf16 / flow", "file"]
    rows = layer_rows(columns)
    rows = [rows[i] for i in (0, 2, 5, 6)]
    return table(columns, rows)


def layer_clock():
    flow = recipe_of(load("profile_deepseek_v3.json"), "fp8_flow")
    steps = sorted(zip(flow["layer clock hertz by step"], flow["layer seconds by step"]))
    third = len(steps) // 3

    def mean(part):
        return sum(c for c, _ in part) / len(part) / 1e6, sum(s for _, s in part) / len(part) * 1e3
    slow, fast = mean(steps[:third]), mean(steps[-third:])
    return (f"In the {len(steps)} steps of the four-GPU DeepSeek-V3 layer under fp8_flow, the {third} steps at the lowest clock (mean "
            f"{slow[0]:.0f} MHz) take {slow[1]:.2f} ms\non average, the {third} at the highest ({fast[0]:.0f} MHz) "
            f"{fast[1]:.2f} ms (`layer seconds by step`, `layer clock hertz by step` in {link('profile_deepseek_v3.json')}).")


STAGE_ORDER = ["norm", "route", "plan", "cast", "dispatch", "fc1", "swiglu", "fc2", "combine", "shared expert", "transpose",
               "fc2 wgrad", "fc2 dgrad", "fc1 wgrad", "fc1 dgrad", "moe layer"]


def stage_ms(recipe):
    """(stage, direction) -> median ms, of the MoE layer alone."""
    result = {}
    for row in recipe["rows"]:
        if row["part"] == "moe layer":
            key = (row["stage"], row["direction"])
            result[key] = result.get(key, 0.0) + row["seconds"]["median"] * 1e3
    return result


def layer_stages():
    profile = load("profile_deepseek_v3.json")
    arms = {r: stage_ms(recipe_of(profile, r)) for r in RECIPES}
    unknown = {stage for arm in arms.values() for stage, _ in arm} - set(STAGE_ORDER)
    assert not unknown, unknown
    rows = []
    for direction in ("forward", "backward"):
        for stage in STAGE_ORDER:
            cells = [arms[r].get((stage, direction)) for r in RECIPES]
            if any(cells):
                label = "between stages" if stage == "moe layer" else stage
                rows.append([f"{label}, {direction}", *("" if c is None else f"{c:.2f}" for c in cells)])
    rows.append(["sum of medians", *(f"{sum(arms[r].values()):.2f}" for r in RECIPES)])
    rows.append(["end to end, without the stage timer", *(f"{layer_ms(recipe_of(profile, r)):.2f}" for r in RECIPES)])
    return table(["ms", *RECIPES], rows) + source(origin("profile_deepseek_v3.json"))


def delayed_wgrad():
    rows = []
    for value in ("false", "true"):
        name = f"profile_deepseek_v3_1gpu_delay_{value}.json"
        recipe = load(name)["recipes"][0]
        ms = stage_ms(recipe)
        saved = sum(recipe["saved bytes"].values()) / 2**30
        rows.append([value, f"{layer_ms(recipe):.2f} ms", f"{ms['fc1 wgrad', 'backward']:.2f} ms", f"{ms['fc2 wgrad', 'backward']:.2f} ms",
                     f"{saved:.2f} GiB"])
    return (table(["moe_wgrad_pair_micro_batches", "layer, a micro-batch", "fc1 wgrad", "fc2 wgrad", "saved"], rows) +
            source(*(origin(f"profile_deepseek_v3_1gpu_delay_{v}.json") for v in ("false", "true"))))


def whole_model():
    """The step of the 107 M model by stage: before the fused heads, serial, and with the shared expert beside."""
    names = ("profile_100m_1gpu_before.json", "profile_100m_1gpu.json")
    before, after = load(names[0])["recipes"][0], load(names[1])
    arms = [before, recipe_of(after, "fp8_flow"), recipe_of(after, "fp8_flow + shared")]

    def ms(recipe, part, stage, direction):
        return sum(r["seconds"]["median"] * 1e3 for r in recipe["rows"] if (r["part"], r["direction"]) == (part, direction) and
                   stage in (None, r["stage"]))
    rows = [[f"attention: {stage}, {direction}", *(f"{ms(arm, 'attention', stage, direction):.3f}" for arm in arms)]
            for direction in ("forward", "backward") for stage in ("norm", "qkv", "core attention", "proj")]
    rows.append(["attention block, a layer", *(f"{ms(a, 'attention', None, 'forward') + ms(a, 'attention', None, 'backward'):.3f}" for a in arms)])
    rows.append(["MoE layer, end to end", *(f"{layer_ms(a):.3f}" for a in arms)])
    rows.append(["embedding, backward", *(f"{ms(a, 'embedding', None, 'backward'):.3f}" for a in arms)])
    rows.append(["head", *(f"{ms(a, 'head', None, 'forward'):.3f}" for a in arms)])
    rows.append(["optimizer", *(f"{ms(a, 'optimizer', None, 'update'):.2f}" for a in arms)])
    rows.append(["step, 8 layers", *(f"{a['step seconds'] * 1e3:.2f}" for a in arms)])
    rows.append(["clock in the layer, MHz", *(f"{a['layer clock hertz']['median'] / 1e6:.0f}" for a in arms)])
    return table(["ms", "before (ff79989)", "serial", "shared expert beside"], rows) + source(*map(origin, names))


def schedule_of(recipe, plain="serial"):
    """What an arm of fp8_flow has besides: "graph" of "fp8_flow + graph"; `plain` where it has nothing."""
    return recipe["name"].replace("fp8_flow + ", "").replace("fp8_flow", plain)


def schedule_rows(parts):
    """Rows of (label, file, file of the program before or None, micro-batches of a step). In turns the layer's forward and backward of two
    micro-batches lie in each other, so that only the step has a time."""
    rows, files = [], []
    for label, name, old, micro_batches in parts:
        arms = [] if old is None else [("serial, ff79989", load(old)["recipes"][0])]
        for r in load(name)["recipes"]:
            schedule = schedule_of(r)
            if schedule != "turns" or micro_batches > 1:
                arms.append(("reduce + turns" if schedule == "turns" else schedule, r))
        for schedule, r in arms:
            layer, energy = r["layer seconds"], r.get("joules per token")
            times = ["", ""] if schedule.endswith("turns") else [f"{layer['median'] * 1e3:.3f}", f"{layer['min'] * 1e3:.3f}"]
            rows.append([label, schedule, *times, f"{r['layer clock hertz']['median'] / 1e6:.0f}", f"{r['step seconds'] * 1e3:.2f}",
                         "" if energy is None else f"{energy * 1e3:.3f}", f"{r['activation bytes'] / 2**20:.0f} MiB"])
        files += [f for f in (name, old) if f is not None]
    return table(["layer", "schedule", "layer ms", "min", "MHz", "step ms", "mJ/token", "activations"], rows, 2) + source(*map(origin, files))


def schedules():
    """Schedules of one GPU side by side, and the program before them in the same call."""
    return schedule_rows([
        ("DeepSeek-V3 dimensions, 32 experts", "profile_deepseek_v3_1gpu_schedules.json", "profile_deepseek_v3_1gpu_before.json", 1),
        ("107 M model", "profile_100m_1gpu.json", "profile_100m_1gpu_before.json", 1)])


def schedules_2gpu():
    """The same on two GPUs that share the experts; all files are of one call."""
    return schedule_rows([
        ("DeepSeek-V3 dimensions, 128 experts", "profile_deepseek_v3_2gpu_schedules.json", "profile_deepseek_v3_2gpu_before.json", 1),
        ("the same, 8 micro-batches", "profile_deepseek_v3_2gpu_micro_batches.json", None, 8),
        ("Qwen3-235B, 128 experts", "profile_qwen3_235b_2gpu_schedules.json", None, 1),
        ("107 M model", "profile_100m_2gpu.json", "profile_100m_2gpu_before.json", 1),
        ("the same, 4 micro-batches", "profile_100m_2gpu_micro_batches.json", None, 4)])


FOUR_GPUS = [  # label, file
    ("4096 tokens", "profile_deepseek_v3_4gpu_schedules.json"),
    ("4096 tokens, weight gradients begin with combine", "profile_deepseek_v3_4gpu_beside.json"),
    ("4096 tokens, squares in FP32", "profile_deepseek_v3_4gpu_latest.json"),
    ("the first, 8 micro-batches", "profile_deepseek_v3_4gpu_micro_batches.json"),
    ("the second, 8 micro-batches", "profile_deepseek_v3_4gpu_beside_micro_batches.json"),
    ("8192 tokens", "profile_deepseek_v3_4gpu_8192_schedules.json"),
    ("4096 tokens, all schedules, graph", "profile_deepseek_v3_4gpu_state_dtypes.json"),
    ("two hosts of two, 128 experts, EP 2 inside", "profile_deepseek_v3_4gpu_hosts_inside.json"),
    ("two hosts of two, EP 4 across", "profile_deepseek_v3_4gpu_hosts_across.json"),
    ("the same, messages of a fixed size", "profile_deepseek_v3_4gpu_hosts_fixed.json"),
    ("the same, two levels", "profile_deepseek_v3_4gpu_hosts_two_levels.json"),
    ("107 M model, EP 4", "profile_100m_4gpu_schedules.json"),
    ("107 M model, EP 2, state whole", "profile_100m_4gpu_state_whole.json"),
    ("the same, state divided", "profile_100m_4gpu_state_divided.json"),
    ("divided, wire beside the layers", "profile_100m_4gpu_state_divided_overlapped.json"),
]


EIGHT_GPUS = [
    ("4096 tokens, EP 8", "profile_deepseek_v3_8gpu_schedules.json"),
    ("EP 4 on four of the eight", "profile_deepseek_v3_4gpu_beside_8gpu.json"),
    ("EP 8, 8 micro-batches", "profile_deepseek_v3_8gpu_micro_batches.json"),
    ("EP 8, 8192 tokens", "profile_deepseek_v3_8gpu_8192_schedules.json"),
    ("EP 8, all schedules, graph", "profile_deepseek_v3_8gpu_state_dtypes.json"),
    ("two hosts of four, EP 4 inside", "profile_deepseek_v3_8gpu_hosts_inside.json"),
    ("two hosts of four, EP 8 across", "profile_deepseek_v3_8gpu_hosts_across.json"),
    ("the same, messages of a fixed size", "profile_deepseek_v3_8gpu_hosts_fixed.json"),
    ("the same, two levels", "profile_deepseek_v3_8gpu_hosts_two_levels.json"),
    ("107 M model, EP 4, state whole", "profile_100m_8gpu_state_whole.json"),
    ("the same, state divided", "profile_100m_8gpu_state_divided.json"),
    ("divided, wire beside the layers", "profile_100m_8gpu_state_divided_overlapped.json"),
]


TWO_HOSTS = [("messages as routed", "profile_deepseek_v3_2gpu_hosts_alltoall_h100.json"),
             ("messages of a fixed size", "profile_deepseek_v3_2gpu_hosts_fixed_h100.json"),
             ("two levels", "profile_deepseek_v3_2gpu_hosts_two_levels_h100.json")]


def hosts_2gpu():
    """Two GPUs as two hosts: how rows cross, and how often the host waits."""
    rows = []
    for label, name in TWO_HOSTS:
        r = load(name)["recipes"][0]
        rows.append([label, f"{r['layer seconds']['median'] * 1e3:.2f}", f"{r['layer clock hertz']['median'] / 1e6:.0f}",
                     f"{r['exposed wire seconds'] * 1e3:.2f}", f"{r['exposed wire seconds between hosts'] * 1e3:.2f}",
                     f"{r['wire bytes']['between hosts'] / 2**20:.1f}", f"{r['host stops per step']:g}", f"{r['step seconds'] * 1e3:.2f}",
                     f"{r['host seconds'] * 1e3:.2f}"])
    return table(["rows cross hosts as", "layer, ms", "MHz", "exposed, ms", "of which between hosts", "MiB between hosts a step",
                  "host stops a step", "step, ms", "host busy, ms"], rows) + source(*(origin(name) for _, name in TWO_HOSTS))


def schedules_of(files):
    """Schedules and state: passes, step, clock, exposed wire, energy. files: [(label, profile)]"""
    rows = []
    for label, name in files:
        profile = load(name)
        first = profile["recipes"][0]["passes seconds"]["median"]
        for r in profile["recipes"]:
            passes = r["passes seconds"]["median"]
            arm = schedule_of(r, "fp32 state" if "graph" in label else "serial")
            rows.append([label, profile["commit"], "overlapped" if "beside the layers" in label else arm, f"{passes * 1e3:.2f}",
                         f"{passes / first:.3f}", f"{r['layer clock hertz']['median'] / 1e6:.0f}", f"{r['step seconds'] * 1e3:.2f}",
                         f"{r['exposed wire seconds'] * 1e3:.2f}", f"{r['joules per token'] * 1e3:.2f}" if r.get("joules per token") else ""])
    return table(["layer", "commit", "schedule", "passes, ms a layer", "of the first", "MHz", "step, ms", "exposed, ms", "mJ a token"], rows, 3) + \
        source(*(origin(name) for _, name in files))


def scale_checks(gpus):
    """What scale_check.sh found, each check as it was last run."""
    name = f"scale_check_h200_x{gpus}.json"
    data, rows = load(name), {}
    for run in data["runs"]:
        for c in run["checks"]:
            if c["result"] != "not run" or c["check"] not in rows:
                figures = c.get("figures") if c["check"].startswith("train") else None
                said = ", ".join(f"{key} {value}" for key, value in figures.items()) if figures else c["detail"]
                where = run.get("commit", data["commit"]) + (f", {run['gpu'].split()[1]}" if "gpu" in run else "")
                rows[c["check"]] = [c["check"], c["result"], c["seconds"] if c["result"] != "not run" else "", where, said.replace("|", "\\|")]
    kept = [row for name, row in rows.items() if not name.startswith(("layer", "state", "model", "exchange")) or row[1] != "passed"]
    last = data["runs"][-1]
    return table(["check", "result", "s", "commit", "what it said"], kept, 5) + source(
        f"{link(name)}, {last['date']}, `{last['command']}` and {len(data['runs']) - 1} more in the file")


def exposed_2gpu():
    """What the layer takes longer because rows cross ranks: passes of a step minus the same without rows."""
    rows, files = [], []
    for label, name in (("DeepSeek-V3 dimensions, 128 experts", "exposed_deepseek_v3_2gpu.json"),
                        ("the same, 8 micro-batches", "exposed_deepseek_v3_2gpu_micro_batches.json"),
                        ("one micro-batch, routing skewed 1.25", "exposed_deepseek_v3_2gpu_skewed_1_25.json"),
                        ("one micro-batch, routing skewed 2.0", "exposed_deepseek_v3_2gpu_skewed_2.json"),
                        ("Mixtral-8x7B, 8 experts", "exposed_mixtral_2gpu.json"), ("107 M model", "exposed_100m_2gpu.json")):
        for r in load(name)["recipes"]:
            schedule = schedule_of(r).replace("turns", "reduce + turns")
            without = r["without rows"]
            rows.append([label, schedule, f"{r['passes seconds']['median'] * 1e3:.3f}", f"{r['layer clock hertz']['median'] / 1e6:.0f}",
                         f"{without['passes seconds']['median'] * 1e3:.3f}", f"{without['layer clock hertz']['median'] / 1e6:.0f}",
                         f"{r['exposed wire seconds'] * 1e3:.3f}"])
        files.append(name)
    return table(["layer", "schedule", "passes, ms a layer", "MHz", "without rows, ms", "MHz", "exposed, ms"], rows, 2) + source(*map(origin, files))


def state_dtypes():
    """Gradients and moments in BF16: layer, weight gradients, optimizer and step."""
    names, rows = {"profile_state_dtypes_2gpu.json": "serial", "profile_state_dtypes_h100_x2.json": "serial",
                   "profile_state_dtypes_ff79989_h100_x2.json": "serial", "profile_state_dtypes_graph_h100_x2.json": "all schedules, graph"}, []
    for name, schedule in names.items():
        profile = load(name)
        for r in profile["recipes"]:
            stages = {s["stage"]: s["seconds"]["median"] * 1e3 for s in r["rows"] if s["direction"] != "forward"}
            rows.append([f"2 x {profile['machine']['device'].split()[1]}, {profile['commit']}", schedule,
                         schedule_of(r, "fp32 state"), f"{r['layer seconds']['median'] * 1e3:.2f}",
                         f"{r['layer clock hertz']['median'] / 1e6:.0f}",
                         f"{stages['fc1 wgrad'] + stages['fc2 wgrad']:.2f}", f"{stages['optimizer']:.2f}",
                         f"{r['step seconds'] * 1e3:.2f}", f"{r['joules per step']:.1f}" if "joules per step" in r else ""])
    return table(["GPUs, commit", "schedule", "state", "layer, ms", "MHz", "weight gradients", "optimizer", "step", "joules a step"], rows, 3) + \
        source(*map(origin, names))


def memory_keys():
    """Rows kept once and room that follows the routing: memory of a layer and time, two GPUs."""
    names = {f"profile_saved_rows_{key}_{gpus}.json": f"{label}, {gpus[:4].upper()}" for gpus in ("h100_x2", "h200_x2") for key, label in
             {"worst_case": "sorted, room for the worst case", "sorted": "sorted", "received": "received", "none": "none"}.items()}
    rows = []
    for name, label in names.items():
        data = load(name)
        r = data["recipes"][0]
        mib = [f"{r[key] / 2**20:.0f}" for key in ("saved bytes used", "saved bytes reserved", "workspace bytes reserved", "activation bytes")]
        rows.append([f"{label}, {data['commit']}", f"{r['routed rows of a layer reserved']}", *mib, f"{r['layer seconds']['median'] * 1e3:.2f}",
                     f"{r['layer clock hertz']['median'] / 1e6:.0f}"])
    return table(["received rows, GPU, commit", "rows reserved", "saved, MiB", "reserved", "workspace reserved", "peak with workspace", "layer, ms", "MHz"],
                 rows) + source(*map(origin, names))


def distributed_optimizer():
    """State divided over two ranks: bytes of a rank, optimizer, gather and step."""
    names, rows = {f"profile_distributed_optimizer_{key}_h100_x2.json": label for key, label in {
        "false": "false", "true": "true", "overlapped": "true, wire beside the layers"}.items()}, []
    for name, label in names.items():
        r = load(name)["recipes"][0]
        held = r["parameter bytes"]
        seconds = {s["stage"]: s["seconds"]["median"] * 1e3 for s in r["rows"]}
        rows.append([label, f"{(held['master'] + held['moments']) / 2**20:.0f}",
                     f"{(held['master'] + held['moments'] + held['main_grad'] + held.get('gathered master', 0)) / 2**20:.0f}",
                     f"{seconds['optimizer']:.2f}", f"{seconds['parameter gather']:.2f}" if "parameter gather" in seconds else "",
                     f"{r['step seconds'] * 1e3:.2f}"])
    return table(["use_distributed_optimizer", "masters, moments, MiB", "with gradients and the gather's buffer", "optimizer, ms", "gather",
                  "step"], rows) + source(*map(origin, names))


def graphs():
    """A step as a CUDA graph: how long it takes, and how long the host is busy."""
    quickstart, larger = "configs/quickstart.yaml, one H100", "configs/h200_100m.yaml, one H100, 4096 tokens"
    names, rows = {"profile_quickstart_graph_h100.json": (quickstart, None),
                   "profile_quickstart_graph_serial_h100.json": (quickstart, "graph"),
                   "profile_quickstart_graph_shared_h100.json": (quickstart, "graph + shared"),
                   "profile_100m_graph_h100.json": (larger, None),
                   "profile_100m_graph_serial_h100.json": (larger, "graph"),
                   "profile_100m_graph_shared_h100.json": (larger, "graph + shared"),
                   "profile_100m_graph_h100_x2.json": ("configs/h200_100m.yaml, two H100s, 4096 tokens a GPU", None)}, []
    for name, (label, schedule) in names.items():
        profile = load(name)
        for r in profile["recipes"]:
            rows.append([label, profile["commit"], schedule or schedule_of(r), f"{r['step seconds'] * 1e3:.2f}",
                         f"{r['host seconds'] * 1e3:.2f}"])
    return table(["model", "commit", "schedule", "step, ms", "host busy, ms"], rows, 3) + source(*map(origin, names))


def hosts_sockets():
    """Two GPUs as two hosts over sockets: what dispatch and combine reach of what NCCL does alone."""
    names, rows = {"profile_sockets_2gpu_routed.json": "as routed", "profile_sockets_2gpu_fixed.json": "of a fixed size"}, []
    for name, label in names.items():
        r = load(name)["recipes"][0]
        raw = float(r["exchange"].split("median ")[1].split()[0]) * 1e9
        for row in r["rows"]:
            if row["stage"] in ("dispatch", "combine"):
                rate = row["wire bytes"] / row["seconds"]["median"]
                rows.append([label, f"{row['stage']}, {row['direction']}", f"{row['wire bytes'] / 2**20:.1f}", f"{row['seconds']['median'] * 1e3:.2f}",
                             f"{rate * 1e-9:.2f}", f"{raw * 1e-9:.2f}", f"{rate / raw * 100:.0f} %", f"{r['host stops per step']:g}"])
    return table(["messages", "call", "MiB each way", "ms", "GB/s", "NCCL alone, 16 MiB", "share", "host stops a step"], rows, 2) + \
        source(*map(origin, names))


def gradient_dtypes():
    """Weight gradients of experts alone, by the type of the gradient."""
    name, rows = "bench_gradient_dtypes_h200.json", []
    found = {}
    for r in load(name):
        shape = dict(part.split("=") for part in r["shape"].split())
        found[shape["type"], shape["G"], shape["N"], shape["K"], shape["mode"], shape["dw"]] = r
    for (kind, groups, n, k, mode, dw), r in found.items():
        if dw != "f32":
            continue
        narrow = found[kind, groups, n, k, mode, "bf16"]
        rows.append([kind, groups, f"{n} x {k}", mode, f"{r['us']:.0f}", f"{narrow['us']:.0f}", f"{narrow['us'] / r['us']:.2f}"])
    return table(["operands", "experts", "weight", "mode", "FP32, us", "BF16, us", "ratio"], rows, 4) + source(origin(name))


def model_operations():
    """Every operation of four whole models at its shape, beside its ceiling."""
    rows = [[r["op"], r["shape"], f"{r['us']:.1f}", f"{r['us_sustained']:.1f}", f"{r['ceiling_us']:.1f}", f"{r['ceiling_share'] * 100:.0f} %"]
            for r in load("bench_model_h200.json") if r["ceiling_us"]]
    return table(["operation", "shape", "us", "sustained", "ceiling, us", "share"], rows, 2) + source(origin("bench_model_h200.json"))


def peer_layers():
    """Whole layers of other implementations, and of this one, on the same GPU."""
    data = load("peers_layers_h200.json")
    rows = []
    for p in data["peers"]:
        cells = []
        for layer in ("deepseek_v3", "qwen3"):
            one = p[layer]
            cells += ["", ""] if one is None else [f"{one['burst ms']:.2f} / {one['sustained ms']:.2f}", f"{one['kernels ms']:.1f}"]
        rows.append([p["peer"], p["recipe"], *cells])
    for own in data["fp8flow"]:
        dsv3, qwen3 = own["deepseek_v3 sustained ms"], own.get("qwen3 sustained ms", {})
        rows += [[f"fp8flow ff79989, gradients: {own['gradients']}", recipe, f"/ {ms:.2f}", "", f"/ {qwen3[recipe]:.2f}" if recipe in qwen3 else "", ""]
                 for recipe, ms in dsv3.items()]
    return (table(["layer", "recipe", "DeepSeek-V3 dimensions, ms", "kernels", "Qwen3 dimensions, ms", "kernels"], rows, 2) +
            source(f"{link('peers_layers_h200.json')}, {data['date']}, {data['gpu']}; the conditions stand in the file"))


def heads():
    rows = [[r["op"], r["shape"], f"{r['us']:.1f}", f"{r['us_min']:.1f}", f"{r['ceiling_us']:.1f}", f"{r['ceiling_share'] * 100:.0f} %"]
            for r in load("bench_heads_h200.json")]
    return table(["operation", "shape", "us", "min", "ceiling, us", "share"], rows, 2) + source(origin("bench_heads_h200.json"))


# ---- loss ----------------------------------------------------------------------------------------------------------------------
def percent(value):
    return "" if value is None else f"{value * 100:.3f} %"


def loss(name):
    data = load(name)
    rows = [[a["arm"], f"{a['held out']:.4f}", percent(a.get("max relative error")), percent(a.get("mean relative error")),
             a["casts per step"], f"{a['wire bytes per step'] / 2**20:.2f} MiB", f"{a['saved bytes'] / 2**20:.1f} MiB", a["verdict"]]
            for a in data["arms"]]
    noise = data["noise floor"]
    said = f"Bar {percent(data['bar'])}; " + (f"noise floor {percent(noise)}" if noise is not None else
                                              "no noise floor: the control arm was off")
    said += f"; iterations {data['warmup_iters'] + 1} to {data['iterations']}, {data['ranks']} rank{'s' if data['ranks'] > 1 else ''}."
    return (table(["arm", "held-out loss", "max error", "mean error", "casts/step", "wire/step", "saved", "verdict"], rows) +
            f"\n\n{said}" + source(origin(name)))


def layer_errors():
    """Norm-wise errors of one layer on the reference backend, against two independent implementations in float64."""
    text = (RESULTS / "io_errors.txt").read_text()
    parts = text.split("\n$ scripts/")
    found = {}
    for column, part in enumerate(parts[1:3]):
        for line in part.splitlines():
            row = re.match(r"(deepseek_v3|qwen3_moe|mixtral) +(\w+(?: bf16)?) +\d+/96 +\S+ +(\S+) +(\S+) +(\S+) +(\S+)$", line)
            if row:
                found.setdefault((row[1], row[2]), [None, None])[column] = row.groups()[2:]
    rows = []
    for (family, arm), columns in found.items():
        cells = [" / ".join(c[i] if c else "-" for c in columns) for i in range(4)]
        rows.append([family, arm, *cells])
    commit = re.search(r"commit ([0-9a-f]{7})", text)[1]
    return (table(["layer", "arm", "output", "d hidden", "d experts", "d router"], rows, 2) +
            source(f"{link('io_errors.txt')}, commit {commit}, whose `$` lines are the commands; numpy in float64 / transformers' blocks in "
                   "float64; `torch bf16` is transformers' own block in BF16"))


def family_errors():
    """Norm-wise errors of one layer of every family against transformers' blocks in float64."""
    text = (RESULTS / "compare_torch_families.txt").read_text()
    rows = [list(row) for row in re.findall(r"^(\S+) +(torch bf16|bf16|fp8_flow) +(\d+/\d+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)$", text, re.M)]
    commit = re.search(r"commit ([0-9a-f]{7})", text)[1]
    return (table(["layer", "arm", "tokens routed alike", "weights", "output", "d hidden", "d experts", "d router"], rows, 2) +
            source(f"{link('compare_torch_families.txt')}, commit {commit}; `torch bf16` is transformers' own block in BF16"))


def training_beside_transformers():
    data = load("compare_training_cpu.json")
    rows = []
    for comparison in data["comparisons"]:
        for arm in comparison["arms"]:
            name = [comparison["family"], comparison["balancing loss"], arm["arm"]]
            first, last = f"{arm['losses'][0]:.4f}", f"{arm['losses'][-1]:.4f}"
            if "loss" not in arm:
                rows.append([*name, first, last] + [""] * 5)
                continue
            loss, gradient = arm["loss"], arm["gradient"]
            kind = max(gradient["kinds"], key=gradient["kinds"].get)
            rows.append([*name, first, last, f"{loss['mean relative']:.1e}", f"{loss['max relative']:.1e}",
                         f"{loss['last tenth relative']:+.1e}", f"{gradient['all']:.1e}", f"{kind} {gradient['kinds'][kind]:.1e}"])
    return (table(["model", "balancing loss", "arm", "first loss", "last", "mean error", "max error", "last tenth", "d all", "worst kind of d"], rows, 3) +
            f"\n\n{data['steps']} steps of {data['tokens per step']} tokens, torch {data['torch']}, transformers {data['transformers']}." +
            source(origin("compare_training_cpu.json")))


# ---- GEMM ----------------------------------------------------------------------------------------------------------------------
def parse_products():
    """Rows of the first sitting of bench_products_h200.txt: {(op, shape): (us, sustained us)}."""
    text = (RESULTS / "bench_products_h200.txt").read_text()
    head, second = text.split("\nSecond, ", 1)

    def rows_of(part):
        rows, op = {}, None
        for line in part.splitlines():
            found = re.match(r"([a-z_]+) +us +min", line)
            if found:
                op = found[1]
            found = re.match(r"(M=.*?)  +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) ", line)
            if op and found:
                rows[op, found[1]] = float(found[2]), float(found[5])
        return rows
    return rows_of(head), rows_of(second)


GEMMS = [
    ("forward, N 4096, K 7168", "grouped_gemm", "M=32768 G=32 align=128 N=4096 K=7168"),
    ("input gradient of fc1, N 7168, K 4096", "grouped_gemm", "M=32768 G=32 align=128 N=7168 K=4096"),
    ("forward, N 7168, K 2048", "grouped_gemm", "M=32768 G=32 align=128 N=7168 K=2048"),
    ("wgrad 4096 x 7168, overwrite", "grouped_gemm_wgrad", "M=32768 G=32 align=128 N=4096 K=7168 micro_batches=1"),
    ("wgrad 4096 x 7168, accumulate", "grouped_gemm_wgrad", "M=32768 G=32 align=128 N=4096 K=7168 mode=accumulate micro_batches=1"),
    ("wgrad 4096 x 7168, 8 groups, overwrite", "grouped_gemm_wgrad", "M=32768 G=8 align=128 N=4096 K=7168 micro_batches=1"),
    ("wgrad 4096 x 7168, 8 groups, accumulate", "grouped_gemm_wgrad",
     "M=32768 G=8 align=128 N=4096 K=7168 mode=accumulate micro_batches=1"),
]


def gemm_flops(shape):
    size = {k: int(v) for k, v in re.findall(r"([A-Z])=(\d+)", shape)}
    return 2.0 * size["M"] * size["N"] * size["K"]


def rates(us, sustained, flops):
    return f"{flops / us / 1e6:.0f} / {flops / sustained / 1e6:.0f}"


def cublaslt(op, shape, kind):
    """The same shape in bench_gemm_h200.json on cuBLASLt."""
    size = {k: int(v) for k, v in re.findall(r"([A-Z])=(\d+)", shape)}
    mode = "accumulate" if "mode=accumulate" in shape else "overwrite"
    for row in load("bench_gemm_h200.json"):
        words = row["shape"].split()
        wanted = [f"M={size['M']}", f"G={size['G']}", "rows=balanced", f"N={size['N']}", f"K={size['K']}", f"type={kind}",
                  "gemm_backend=cublaslt"]
        if op == "grouped_gemm_wgrad":
            wanted.append(f"mode={mode}")
        if row["op"] == op and all(w in words for w in wanted) and row["us_sustained"]:
            return rates(row["us"], row["us_sustained"], row["flops"])
    return ""


def gemm():
    first, second = parse_products()
    rows = []
    for label, op, shape in GEMMS:
        flops = gemm_flops(shape)
        bf16_shape = shape.replace(" micro_batches=1", "").replace(" mode=", " type=bf16 mode=")
        if "type=bf16" not in bf16_shape:
            bf16_shape += " type=bf16"
        bf16 = first.get((op, bf16_shape)) or second.get((op, bf16_shape))
        rows.append([label, rates(*first[op, shape], flops), cublaslt(op, shape, "fp8"), rates(*bf16, flops) if bf16 else "",
                     cublaslt(op, shape, "bf16")])
    text = (RESULTS / "bench_products_h200.txt").read_text()
    commits = re.findall(r"commit ([0-9a-f]{7})", text)
    return (table(["32,768 rows in 32 groups, TFLOP/s burst / sustained", "FP8", "FP8, cuBLASLt", "BF16", "BF16, cuBLASLt"], rows) +
            source(f"{link('bench_products_h200.txt')}, commits {commits[0]} (FP8, BF16 forward) and {commits[1]} (BF16 wgrad), whose `$` lines are "
                   "the commands", origin("bench_gemm_h200.json") + " (cuBLASLt, on another H200)"))


def gemm_errors():
    data = load("bench_gemm_h200.json")

    def span(op, kind):
        errors = [r["nmse"] for r in data if r["op"] == op and f"type={kind}" in r["shape"] and r["nmse"]]
        return f"{min(errors):.1e} to {max(errors):.1e}"
    forward = [r["nmse"] for r in data if r["op"] == "grouped_gemm" and r["nmse"]]
    return (table(["GEMM", "NMSE against a double-precision product of the same operands"],
                  [["BF16 results (forward, data gradient)", f"{min(forward):.1e} to {max(forward):.1e}"],
                   ["FP8 weight gradients, FP32 results", span("grouped_gemm_wgrad", "fp8")],
                   ["BF16 weight gradients, FP32 results", span("grouped_gemm_wgrad", "bf16")]]) +
            source(origin("bench_gemm_h200.json")))


def gemm_baseline():
    """BF16 grouped GEMM against the dense BF16 rate of the same sitting, as the files print it."""
    first, second = (RESULTS / "bench_products_h200.txt").read_text().split("\nSecond, ", 1)
    shares = []
    for part in (first, second):
        forward, wgrad = [], []
        op = None
        for line in part.splitlines():
            found = re.match(r"([a-z_]+) +us +min", line)
            op = found[1] if found else op
            found = re.match(r"M=.* type=bf16(.*?)  .* TFLOP/s BF16 +([\d.]+) %", line)
            if found and op == "grouped_gemm":
                forward.append(float(found[2]))
            elif found and op == "grouped_gemm_wgrad" and "accumulate" not in found[1]:
                wgrad.append(float(found[2]))
        shares.append((forward, wgrad))
    forward, wgrad = shares[0][0] + shares[1][0], shares[1][1]
    return (f"The BF16 baseline against cuBLASLt's dense BF16 rate of the same run: forward {min(forward):.1f} to {max(forward):.1f} % over "
            f"{len(forward)} measured shapes,\noverwriting weight gradients {min(wgrad):.1f} to {max(wgrad):.1f} % over {len(wgrad)} (32, 8 and 64 "
            f"groups of 32,768 rows).\nBoth sittings are in {link('bench_products_h200.txt')}.")


def fused_fc1():
    first, _ = parse_products()
    rows = []
    for label, fused, plain, activation in [
            ("32 groups, F 2048, K 7168", "M=32768 G=32 align=128 F=2048 K=7168 save_h=no", "M=32768 G=32 align=128 N=4096 K=7168",
             "M=32768 G=32 align=128 F=2048"),
            ("16 groups, F 1536, K 4096", "M=32768 G=16 align=128 F=1536 K=4096 save_h=no", "M=32768 G=16 align=128 N=3072 K=4096",
             "M=32768 G=16 align=128 F=1536")]:
        one, gemm_us = first["grouped_gemm_swiglu_quantize", fused][0], first["grouped_gemm", plain][0]
        act = first["swiglu_quantize", activation][0]
        rows.append([label, f"{one:.0f} us", f"{gemm_us:.0f} us", f"{act:.0f} us", f"{gemm_us + act:.0f} us"])
    commit = re.search(r"commit ([0-9a-f]{7})", (RESULTS / "bench_products_h200.txt").read_text())[1]
    return (table(["shape", "fused, h not written", "grouped_gemm", "swiglu_quantize", "both"], rows) +
            source(f"{link('bench_products_h200.txt')}, commit {commit}"))


def deepgemm():
    text = (RESULTS / "bench_deepgemm_h200.txt").read_text()
    part = text[text.index("\nI. "):text.index("\nII. ")]
    rows = []
    for line in part.splitlines():
        found = re.match(r" ?(\d+ x +\d+, N \d+, K \d+|32 groups of 512 to 1664, N \d+, K \d+)(?: \([^)]*\))? {2,}(.*)", line)
        if not found or re.search(r"first|second", line):
            continue
        numbers = re.findall(r"[\d.]+", re.sub(r"\([^)]*\)", " ", found[2]))
        ours1, ratio1, ours2, ratio2 = numbers[0], numbers[6], numbers[7], numbers[13]
        rows.append([re.sub(" +", " ", found[1]), f"{float(ours1):.0f} us", ratio1, f"{float(ours2):.0f} us", ratio2])
    assert len(rows) == 12, len(rows)
    wgrad = []
    for line in part.splitlines():
        found = re.match(r" ?(\d+ x +\d+, \d+ x \d+) {2,}(.*)", line)
        if not found:
            continue
        groups = [g.strip() for g in re.findall(r"(?:[\d.]+; *[\d.]+; *[\d.]+)", found[2])]
        wgrad.append([re.sub(" +", " ", found[1]), groups[0] + " us", groups[4]])
    assert len(wgrad) == 4, len(wgrad)
    commit = re.search(r"own kernels of commit ([0-9a-f]{7})", text)[1]
    return (table(["rows grouped", "first machine", "DeepGEMM / ours", "second machine", "DeepGEMM / ours"], rows) + "\n\n" +
            table(["FP8 wgrad, accumulated into FP32", "ours, three machines", "DeepGEMM / ours"], wgrad) +
            source(f"{link('bench_deepgemm_h200.txt')}, part I, commit {commit}, DeepGEMM 54e2261; a stand-alone program that the file "
                   "describes, not in the repository"))


# ---- memory-bound operations, exchange -----------------------------------------------------------------------------------------
MEMORY = [
    ("quantise rows 1x128", "upstream", "quantize_rows", "M=32768 H=7168 layout=vec128"),
    ("quantise per tensor", "layer", "quantize_tensor", "M=32768 H=7168"),
    ("quantise rows and columns", "layer", "quantize_dual", "M=32768 H=7168"),
    ("quantise columns, a scale per group", "upstream", "quantize_columns", "M=32768 G=32 rows=balanced H=7168 H2=0 scale=pow2"),
    ("the same, ragged groups", "upstream", "quantize_columns", "M=32768 G=32 rows=ragged H=7168 H2=0 scale=pow2"),
    ("dequantise", "layer", "dequantize", "M=32768 H=7168"),
    ("quantise weights 128x128, both copies", "upstream", "quantize_weight", "E=32 N=4096 K=7168 layout=block128"),
    ("AdamW + both FP8 copies, 8 experts", "upstream", "adamw_quantize", "E=8 N=4096 K=7168"),
    ("gradient norm, 268 M elements", "upstream", "norm_squared", "N=268435456"),
    ("scaling-aware transpose", "upstream", "transpose_fp8", "M=32768 G=32 rows=balanced H=7168"),
    ("transpose with new scales", "upstream", "transpose_requantize", "M=32768 G=32 H=7168 fused=yes"),
    ("dispatch FP8, one GPU", "upstream", "dispatch", "T=4096 E=32 H=7168 wire=fp8"),
    ("combine, one GPU", "upstream", "combine", "T=4096 E=32 H=7168 part=whole"),
    ("permute + pad, FP8", "upstream", "permute_pad", "T=4096 E=32 K=8 rows=ragged align=128 H=7168 dtype=e4m3 scales=yes fused=yes"),
    ("permute + pad, BF16", "upstream", "permute_pad", "T=4096 E=32 K=8 rows=ragged align=128 H=7168 dtype=bf16 fused=yes"),
    ("unpermute + unpad", "upstream", "unpermute_unpad", "T=4096 E=32 K=8 rows=ragged align=128 H=7168 prob=no fused=yes"),
    ("RMSNorm", "upstream", "rms_norm", "T=4096 H=7168 dtype=bf16"),
    ("RMSNorm to FP8 + BF16", "upstream", "rms_norm_quantize", "T=4096 H=7168 fp8=vec128_wire y=yes fused=yes"),
    ("RMSNorm backward + residual", "upstream", "rms_norm_backward", "T=4096 H=7168 residual=yes"),
    ("SwiGLU x prob to FP8", "upstream", "swiglu_quantize", "M=32768 G=32 rows=balanced F=2048 fused=yes"),
    ("SwiGLU backward to FP8", "upstream", "swiglu_backward_quantize", "M=32768 G=32 rows=balanced F=2048 fused=yes"),
    ("cross-entropy, 129,280 columns, 1024 tokens", "upstream", "cross_entropy", "T=1024 V=129280"),
    ("router logits, E = 256", "layer", "router_logits", "T=4096 E=256 H=7168"),
    ("router logits backward, E = 256", "layer", "router_logits_backward", "T=4096 E=256 H=7168"),
    ("routing of 8192 tokens, forward", "upstream", "router_top_k", "T=8192 E=256"),
    ("routing of 8192 tokens, backward", "upstream", "router_top_k_backward", "T=8192 E=256"),
]


def the_row(rows, op, words):
    found = [r for r in rows if r["op"] == op and set(words.split()) <= set(r["shape"].split())]
    assert len(found) == 1, (op, words, len(found))
    return found[0]


def memory_bound():
    files = {"upstream": load("bench_upstream_h200.json"), "layer": load("bench_layer_h200.json")}
    rows = []
    for label, suite, op, words in MEMORY:
        row = the_row(files[suite], op, words)
        rows.append([label, f"`{op}`", f"{row['us']:.0f}", f"{row['ceiling_share'] * 100:.0f} %", suite, row["commit"]])
    return (table(["operation", "bench row", "us", "share of its ceiling", "suite", "commit"], rows, 2) +
            source(origin("bench_upstream_h200.json"), origin("bench_layer_h200.json")))


def upstream_counts():
    data = load("bench_upstream_h200.json")
    judged = [r for r in data if r["holds_bar"] is not None]
    held = [r for r in judged if r["holds_bar"]]
    peers = [r for r in data if r["peer_us"] and "H200" in (r["peer_gpu"] or "")]
    fast = [r for r in peers if r["peer_us"] >= r["us"]]
    worst = min(r["peer_us"] / r["us"] for r in peers)
    missed = {}
    for r in judged:
        if not r["holds_bar"]:
            missed[r["op"]] = missed.get(r["op"], 0) + 1
    named = ", ".join(f"`{op}` {n}" for op, n in sorted(missed.items(), key=lambda item: (-item[1], item[0])))
    return (f"{len(data)} rows; {len(judged)} have a target, {len(held)} meet it. {len(peers)} rows have a peer measured on an H200; {len(fast)} of them "
            f"take no longer than the\npeer, the slowest takes {1 / worst:.3f} times its time. Rows that miss their target, by operation: {named}."
            + source(origin("bench_upstream_h200.json"), link("peers_torch_h200.jsonl") + " and model/bench/peer_figures.cpp for the peers"))


def exchange():
    rows = []
    for gpus in (8, 4, 2):
        data = load(f"bench_exchange_h200_x{gpus}.json")
        for tokens in (4096, 8192, 16384):
            for op, words in (("dispatch", "wire=fp8"), ("dispatch", "wire=bf16"), ("combine", "part=whole order=rank dprob=no")):
                row = the_row(data, op, f"T={tokens} {words} sms=0 peer=none")
                plain = [r for r in data if r["op"] == op and
                         set(f"T={tokens} {words} sms=0 peer=alltoall".split()) <= set(r["shape"].split())]
                rows.append([op + (" FP8" if "fp8" in words else " BF16"), tokens, gpus, f"{row['us']:.0f}",
                             f"{row['wire_bytes'] / row['us'] / 1e3:.0f}", f"{row['ceiling_share'] * 100:.0f} %",
                             f"{row['peer_us']:.0f}" if row["peer_us"] else "",
                             f"{plain[0]['peer_us'] / plain[0]['us']:.1f}x" if plain else ""])
    return (table(["", "tokens", "GPUs", "us", "wire, GB/s", "share of ceiling", "DeepEP V2, us", "against plain"], rows) +
            source(*(origin(f"bench_exchange_h200_x{g}.json") for g in (8, 4, 2))))


def exchange_sms():
    sms = [8, 16, 24, 32, 64, 132]
    rows = []
    for gpus in (8, 4, 2):
        data = load(f"bench_exchange_h200_x{gpus}.json")
        for op, words in (("dispatch", "wire=fp8"), ("combine", "part=whole dprob=no")):
            rows.append([f"{op}, {gpus} GPUs, us",
                         *(f"{the_row(data, op, f'T=4096 {words} sms={n} peer=none')['us']:.0f}" for n in sms)])
    return (table(["SMs (4096 tokens)", *sms], rows) + source(*(origin(f"bench_exchange_h200_x{g}.json") for g in (8, 4, 2))))


def short_rows():
    """Dispatch and combine of rows of several widths, by commit; means over the runs of a commit."""
    data = load("bench_short_rows_h200_x4.json")
    commits = list(dict.fromkeys(row["commit"] for row in data))
    times = {}
    for row in data:
        size = {word[0]: int(word[2:]) for word in row["shape"].split() if word[:2] in ("T=", "H=")}
        times.setdefault((row["gpus"], row["op"], size["T"], size["H"]), {}).setdefault(row["commit"], []).append(row)
    rows = []
    for key, by_commit in sorted(times.items()):
        means = [f"{sum(row['us'] for row in by_commit[c]) / len(by_commit[c]):.0f}" if c in by_commit else "" for c in commits]
        rows.append([*map(str, key), *means, f"{by_commit[next(iter(by_commit))][0]['ceiling_us']:.0f}"])
    return table(["GPUs", "operation", "tokens", "columns", *(f"{c}, us" for c in commits), "ceiling, us"], rows, 2) + source(
        link("bench_short_rows_h200_x4.json"), f"{data[-1]['date'][:10]}", f"`{data[-1]['command']}` and {len({row['command'] for row in data}) - 1} more in the file")


# ---- checks --------------------------------------------------------------------------------------------------------------------
CHECKS = ["gpu_check_1gpu.json", "gpu_check_2gpu.json", "gpu_check_4gpu.json"]


def check_runs():
    for name in CHECKS:
        data = load(name)
        for run in data.get("runs", [data]):
            yield name, data["gpus"], run


def gpu_checks():
    rows = []
    for name, gpus, run in check_runs():
        results = [c["result"] for c in run["checks"]]
        rows.append([link(name), run["commit"], gpus, results.count("passed"), results.count("failed"), results.count("not run")])
    return table(["file", "commit", "GPUs", "passed", "failed", "not run"], rows, 2)


def gpu_failures():
    rows = [[c["check"], run["commit"], c["detail"].replace("|", "\\|"), link(name)]
            for name, _, run in check_runs() for c in run["checks"] if c["result"] == "failed"]
    return table(["check", "commit", "what the tool said", "file"], rows, 4)


def checkpoints():
    cpu, gpu = load("io_matrix.json"), load("io_matrix_h200.json")
    rows = [[link("io_matrix.json"), cpu["commit"], cpu["machine"], f"{cpu['held']} of {cpu['of']}", f"`{cpu['command']}`"]]
    rows += [[link("io_matrix_h200.json"), run["commit"], run["machine"], f"{run['held']} of {run['of']}", f"`{run['command']}`"] for run in gpu]
    return table(["file", "commit", "machine", "cells that hold", "command"], rows, 5)


# ---- the page of the results ---------------------------------------------------------------------------------------------------
def results_page():
    return table(["file", "what it is", "commit", "date", "machine", "command"], results_index.rows(), 6)


# ---- the picture ---------------------------------------------------------------------------------------------------------------
GROUPS = [  # label, stages, colour: readable on white and on near-black
    ("dispatch, combine", ["dispatch", "combine"], "#d9703a"),
    ("fc1, fc2 forward", ["fc1", "fc2"], "#3b6fb6"),
    ("fc1, fc2 dgrad", ["fc1 dgrad", "fc2 dgrad"], "#4fa3b8"),
    ("fc1, fc2 wgrad", ["fc1 wgrad", "fc2 wgrad"], "#3f9a75"),
    ("shared expert", ["shared expert"], "#8c62aa"),
    ("swiglu", ["swiglu"], "#c2992b"),
    ("cast", ["cast"], "#c23b4e"),
    ("transpose", ["transpose"], "#6f7d2c"),
    ("norm, route, plan, rest", ["norm", "route", "plan", "moe layer"], "#8a93a0"),
]


def picture():
    profile = load("profile_deepseek_v3.json")
    width, left, right, bar, gap, top = 960, 150, 110, 46, 22, 128
    scale = (width - left - right) / max(sum(stage_ms(recipe_of(profile, r)).values()) for r in RECIPES)
    height = top + len(RECIPES) * (bar + gap) + 44
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
           f'font-family="DejaVu Sans, Arial, sans-serif">',
           "<title>Time of the DeepSeek-V3 MoE layer on four H200s by recipe and stage</title>",
           "<style>.t{fill:#1f2937}.s{fill:#4b5563}@media (prefers-color-scheme: dark){.t{fill:#e5e7eb}.s{fill:#b6bec9}}</style>",
           '<text x="24" y="34" class="t" font-size="18" font-weight="bold">DeepSeek-V3 MoE layer, forward + backward, ms</text>',
           f'<text x="24" y="56" class="s" font-size="12.5">4 x {profile["machine"]["device"]}, 256 experts, top-8, 4096 tokens a GPU, balanced '
           f'routing; medians of {profile["steps"]} steps, commit {profile["commit"]}</text>']
    x, y = 24, 82
    for label, _, colour in GROUPS:
        step = 24 + 7.4 * len(label) + 12
        if x + step > width - 16:
            x, y = 24, y + 20
        out.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="{y}" class="s" font-size="12">{label}</text>')
        x += step
    for i, name in enumerate(RECIPES):
        recipe = recipe_of(profile, name)
        stages = stage_ms(recipe)
        y = top + i * (bar + gap)
        out.append(f'<text x="{left - 12}" y="{y + bar / 2 + 5:.0f}" class="t" font-size="14" text-anchor="end">{name}</text>')
        x = float(left)
        for label, members, colour in GROUPS:
            ms = sum(v for (stage, _), v in stages.items() if stage in members)
            if ms == 0:
                continue
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{ms * scale:.1f}" height="{bar}" fill="{colour}"><title>{label}: {ms:.2f} ms</title></rect>')
            if ms * scale > 34:
                out.append(f'<text x="{x + ms * scale / 2:.1f}" y="{y + bar / 2 + 4:.0f}" fill="#ffffff" font-size="12" '
                           f'text-anchor="middle">{ms:.2f}</text>')
            x += ms * scale
        out.append(f'<text x="{x + 10:.1f}" y="{y + bar / 2 + 6:.0f}" class="t" font-size="17" font-weight="bold">{layer_ms(recipe):.2f} ms</text>')
    out.append(f'<text x="24" y="{height - 18}" class="s" font-size="12">Bars: medians of the stages under the stage timer. Bold: end to end, '
               'measured in a second pass without it.</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


# ---- transposed copies ---------------------------------------------------------------------------------------------------------
TRANSPOSED = [  # run, file
    ("configs/quickstart.yaml, 2 CPU ranks", "transposed_quickstart_cpu.json"),
]


def flushed_at(iteration, tensor):
    """Share of the nonzero values of a tensor, over all weights."""
    rows = [row for row in iteration["transposed"] if row["tensor"] == tensor]
    return sum(row["flushed"] for row in rows) / sum(row["nonzero"] for row in rows)


def transposed():
    header = ["run", "copy", "values not 0", "flushed", "at iteration", "and at", "most of a norm^2", "of", "most NMSE"]
    lines = []
    for run, name in TRANSPOSED:
        iterations = load(name)["iterations"]
        first, last = iterations[0], iterations[-1]
        for tensor in ["dye^T", "dh^T", "a^T", "xe^T"]:
            rows = [(row, step["iteration"]) for step in iterations for row in step["transposed"] if row["tensor"] == tensor]
            values, flushed = (sum(row[key] for row, _ in rows) for key in ("nonzero", "flushed"))
            most, when = max(rows, key=lambda pair: pair[0]["flushed norm share"])
            lines.append([run, tensor, f"{values / 1e6:.1f} M", f"{flushed / values:.5%}".replace("%", " %"),
                          *(f"{step['iteration']}: {flushed_at(step, tensor):.5%}".replace("%", " %") for step in (first, last)),
                          f"{most['flushed norm share']:.1e}", f"{most['weight'].removesuffix('.weight')}, {when}",
                          f"{max(row['nmse'] for row, _ in rows):.1e}"])
    return table(header, lines, 2) + source(*(origin(name) for _, name in TRANSPOSED))


TABLES = {
    "layers": layers, "layers_short": layers_short, "layers_4gpu": layers_4gpu, "layer_clock": layer_clock, "layer_stages": layer_stages,
    "delayed_wgrad": delayed_wgrad, "whole_model": whole_model, "schedules": schedules, "schedules_2gpu": schedules_2gpu, "exposed_2gpu": exposed_2gpu,
    "schedules_4gpu": lambda: schedules_of(FOUR_GPUS), "scale_checks": lambda: scale_checks(4),
    "schedules_8gpu": lambda: schedules_of(EIGHT_GPUS), "scale_checks_8gpu": lambda: scale_checks(8),
    "hosts_2gpu": hosts_2gpu,
    "hosts_sockets": hosts_sockets,
    "graphs": graphs, "state_dtypes": state_dtypes, "memory_keys": memory_keys, "distributed_optimizer": distributed_optimizer, "gradient_dtypes": gradient_dtypes,
    "model_operations": model_operations, "heads": heads, "peer_layers": peer_layers,
    "loss_100m_1gpu": lambda: loss("validate_100m_1gpu.json"),
    "loss_reference": lambda: loss("quickstart_recipes.json"), "loss_ablation": lambda: loss("quickstart_ablation.json"),
    "loss_h200": lambda: loss("quickstart_recipes_h200.json"),
    "loss_combine": lambda: loss("quickstart_combine_h200.json"), "loss_100m": lambda: loss("validate_h200_100m.json"),
    "layer_errors": layer_errors, "family_errors": family_errors, "training_beside_transformers": training_beside_transformers,
    "gemm": gemm, "gemm_baseline": gemm_baseline, "gemm_errors": gemm_errors, "fused_fc1": fused_fc1, "deepgemm": deepgemm,
    "memory_bound": memory_bound, "upstream_counts": upstream_counts, "exchange": exchange, "exchange_sms": exchange_sms, "short_rows": short_rows,
    "transposed": transposed, "gpu_checks": gpu_checks, "gpu_failures": gpu_failures, "checkpoints": checkpoints, "results_index": results_page,
}
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
