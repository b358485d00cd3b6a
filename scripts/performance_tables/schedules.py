# SPDX-License-Identifier: MIT
"""Tables of docs/performance/schedules.md, and of schedules on eight GPUs."""
import collections

from performance_tables.common import layer_ms, link, load, origin, schedule_of, source, stage_ms, table


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
            layer, megahertz = r["layer seconds"], r["layer clock hertz"]["median"] / 1e6
            times = ["", "", f"{megahertz:.0f}", ""] if schedule.endswith("turns") else \
                [f"{layer['median'] * 1e3:.3f}", f"{layer['min'] * 1e3:.3f}", f"{megahertz:.0f}", f"{layer['median'] * megahertz:.2f}"]
            rows.append([label, schedule, *times, f"{r['step seconds'] * 1e3:.2f}", f"{r['activation bytes'] / 2**20:.0f} MiB"])
        files += [f for f in (name, old) if f is not None]
    return table(["layer", "schedule", "layer ms", "min", "MHz", "M cycles", "step ms", "activations"], rows, 2) + source(*map(origin, files))


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


def gemm_waves():
    """GEMMs in waves of CTAs: runs of one case and number of waves beside each other."""
    name, runs = "gemm_waves_h200_x2.json", collections.defaultdict(list)
    data = load(name)["runs"]
    for run in data:
        for row in run["rows"]:
            if row["schedule"] in ("serial", "wgrad", "shared + wgrad", "turns"):
                runs[run["case"], run["waves"], row["schedule"]].append(row)
    lines = []
    for (case, waves, schedule), rows in runs.items():
        cells = [", ".join(f"{row[key]:{form}}" for row in rows) for key, form in
                 (("layer ms", ".2f"), ("MHz", ""), ("wire ms", ".2f"), ("step ms", ".1f"))]
        lines.append([case, waves, schedule, "" if schedule == "turns" else cells[0], *cells[1:]])
    return table(["layer", "waves", "schedule", "layer, ms", "MHz", "wire, ms", "step, ms"], lines, 3) + source(
        f"{link(name)}, commit {data[0]['commit']}, {data[0]['date']}, `{data[0]['command']}` and {len(data) - 1} more in the file")


FOUR_GPUS = [  # label, file
    ("4096 tokens", "profile_deepseek_v3_4gpu_schedules.json"),
    ("4096 tokens, weight gradients begin with combine", "profile_deepseek_v3_4gpu_beside.json"),
    ("4096 tokens, squares in FP32", "profile_deepseek_v3_4gpu_latest.json"),
    ("4096 tokens, latest", "exposed_deepseek_v3_4gpu.json"),
    ("4096 tokens, BF16 gradients", "exposed_deepseek_v3_4gpu_bf16_gradients.json"),
    ("4096 tokens, 8 micro-batches", "profile_deepseek_v3_4gpu_micro_batches.json"),
    ("weight gradients begin with combine, 8 micro-batches", "profile_deepseek_v3_4gpu_beside_micro_batches.json"),
    ("8 micro-batches, latest", "exposed_deepseek_v3_4gpu_micro_batches.json"),
    ("8192 tokens", "profile_deepseek_v3_4gpu_8192_schedules.json"),
    ("4096 tokens, all schedules, graph", "profile_deepseek_v3_4gpu_state_dtypes.json"),
    ("two hosts of two, 128 experts, EP 2 inside", "profile_deepseek_v3_4gpu_hosts_inside.json"),
    ("two hosts of two, EP 4 across", "profile_deepseek_v3_4gpu_hosts_across.json"),
    ("the same, messages of a fixed size", "profile_deepseek_v3_4gpu_hosts_fixed.json"),
    ("the same, two levels", "profile_deepseek_v3_4gpu_hosts_two_levels.json"),
    ("107 M model, EP 4", "profile_100m_4gpu_schedules.json"),
    ("107 M model, EP 4, latest", "exposed_100m_4gpu.json"),
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


def schedules_of(files):
    """Schedules and state: passes, clock, cycles, step, wire calls. files: [(label, profile)]"""
    rows = []
    for label, name in files:
        profile = load(name)
        first = profile["recipes"][0]["passes seconds"]["median"]
        for r in profile["recipes"]:
            passes = r["passes seconds"]["median"]
            arm = schedule_of(r, "fp32 state" if "graph" in label else "serial")
            rows.append([label, profile["commit"], "overlapped" if "beside the layers" in label else arm,
                         "" if arm.endswith("turns") else f"{layer_ms(r):.2f}",
                         f"{passes * 1e3:.2f}", f"{passes / first:.3f}", f"{r['layer clock hertz']['median'] / 1e6:.0f}",
                         f"{passes * r['layer clock hertz']['median'] / 1e6:.2f}", f"{r['step seconds'] * 1e3:.2f}",
                         f"{r['wire seconds'] * 1e3:.2f}"])
    return table(["layer", "commit", "schedule", "layer, ms", "passes, ms a layer", "of the first", "MHz", "M cycles", "step, ms", "wire, ms"],
                 rows, 3) + source(*(origin(name) for _, name in files))


EXPOSED_2_GPUS = [
    ("DeepSeek-V3 dimensions, 128 experts", "exposed_deepseek_v3_2gpu.json"),
    ("the same, 8 micro-batches", "exposed_deepseek_v3_2gpu_micro_batches.json"),
    ("one micro-batch, routing skewed 1.25", "exposed_deepseek_v3_2gpu_skewed_1_25.json"),
    ("one micro-batch, routing skewed 2.0", "exposed_deepseek_v3_2gpu_skewed_2.json"),
    ("Mixtral-8x7B, 8 experts", "exposed_mixtral_2gpu.json"),
    ("107 M model", "exposed_100m_2gpu.json"),
]


EXPOSED_4_GPUS = [
    ("DeepSeek-V3 dimensions, 256 experts", "exposed_deepseek_v3_4gpu.json"),
    ("the same, BF16 gradients", "exposed_deepseek_v3_4gpu_bf16_gradients.json"),
    ("FP32 gradients, 8 micro-batches", "exposed_deepseek_v3_4gpu_micro_batches.json"),
    ("107 M model", "exposed_100m_4gpu.json"),
]


def exposed(files):
    """What the layer takes longer because rows cross ranks: passes of a step minus the same without rows; and how long calls take and have nothing
    beside them, where the file says so. files: [(label, profile)]"""
    rows, with_alone = [], "wire seconds alone" in load(files[0][1])["recipes"][0]
    for label, name in files:
        for r in load(name)["recipes"]:
            without = r["without rows"]
            alone = [f"{r[key] * 1e3:.3f}" for key in ("wire seconds", "wire seconds alone")] if with_alone else []
            rows.append([label, schedule_of(r), f"{r['passes seconds']['median'] * 1e3:.3f}", f"{r['layer clock hertz']['median'] / 1e6:.0f}",
                         f"{without['passes seconds']['median'] * 1e3:.3f}", f"{without['layer clock hertz']['median'] / 1e6:.0f}",
                         f"{r['exposed wire seconds'] * 1e3:.3f}", *alone])
    return table(["layer", "schedule", "passes, ms a layer", "MHz", "without rows, ms", "MHz", "exposed, ms",
                  *(["wire, ms", "alone, ms"] if with_alone else [])], rows, 2) + source(*(origin(name) for _, name in files))


TABLES = {
    "schedules": schedules,
    "schedules_2gpu": schedules_2gpu,
    "exposed_2gpu": lambda: exposed(EXPOSED_2_GPUS),
    "exposed_4gpu": lambda: exposed(EXPOSED_4_GPUS),
    "gemm_waves": gemm_waves,
    "delayed_wgrad": delayed_wgrad,
    "schedules_4gpu": lambda: schedules_of(FOUR_GPUS),
    "schedules_8gpu": lambda: schedules_of(EIGHT_GPUS),
}
