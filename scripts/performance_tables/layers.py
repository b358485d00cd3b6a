# SPDX-License-Identifier: MIT
"""Tables of whole layers, schedules, memory and whole models: docs/performance.md and docs/performance/layers.md."""
from performance_tables.common import RECIPES, layer_ms, link, load, origin, recipe_of, schedule_of, source, stage_ms, table

LAYERS = [  # label, file
    ("DeepSeek-V3 dimensions, 32 experts", "profile_deepseek_v3_1gpu.json"),
    ("Qwen3-235B dimensions, 32 experts", "profile_qwen3_1gpu.json"),
    ("DeepSeek-V3, 256 experts", "profile_deepseek_v3_4gpu_recipes.json"),
    ("DeepSeek-V3, 256 experts", "profile_deepseek_v3_8192.json"),
    ("Qwen3-235B, 128 experts", "profile_qwen3_235b_a22b_4gpu.json"),
    ("Qwen3-30B, 128 experts", "profile_qwen3_30b_a3b_4gpu.json"),
    ("Mixtral-8x7B, 8 experts", "profile_mixtral_8x7b_4gpu.json"),
    ("DeepSeek-V2-Lite, 64 experts", "profile_deepseek_v2_lite_4gpu.json"),
]
STAGES = "profile_deepseek_v3_4gpu_recipes.json"  # the layer that is shown stage by stage


def mhz(recipe):
    return recipe["layer clock hertz"]["median"] / 1e6


def layers():
    """One MoE layer under three recipes."""
    rows = []
    for label, name in LAYERS:
        profile = load(name)
        arms = [recipe_of(profile, recipe) for recipe in RECIPES]
        flow = arms[-1]
        rows.append([label, round(flow["tokens per second per gpu"] * flow["layer seconds"]["median"]), profile["ranks"],
                     *(f"{layer_ms(arm):.2f}" for arm in arms), f"{mhz(arms[0]):.0f}, {mhz(flow):.0f}",
                     f"**{layer_ms(arms[0]) / layer_ms(flow):.2f}**", f"{flow['tokens per second per gpu'] / 1e3:.0f} k",
                     f"{flow['flops per second per gpu'] / 1e12:.0f}"])
    return table(["layer", "tokens per GPU", "GPUs", *(f"{r}, ms" for r in RECIPES), "MHz, bf16, flow", "bf16 / flow", "tokens/s/GPU", "TFLOP/s/GPU"],
                 rows) + source(*(origin(name) for _, name in LAYERS))


def headline():
    """README's table: layers, whole models, loss."""
    rows = []
    for label, name in (LAYERS[0], LAYERS[2], LAYERS[3]):
        profile = load(name)
        arms = [recipe_of(profile, recipe) for recipe in RECIPES]
        tokens = round(arms[-1]["tokens per second per gpu"] * arms[-1]["layer seconds"]["median"])
        rows.append([f"MoE layer, {label}, {profile['ranks']} GPU{'s' if profile['ranks'] > 1 else ''}, {tokens} tokens each",
                     *(f"{layer_ms(arm):.2f} ms" for arm in arms), f"**{layer_ms(arms[0]) / layer_ms(arms[-1]):.2f} x**"])
    held = {arm["arm"]: arm["held out"] for arm in load("validate_h200_100m.json")["arms"]}
    rows.append(["held-out loss of a 107 M model after 1000 iterations, 4 GPUs", f"{held['bf16']:.4f}", "", f"{held['fp8_flow']:.4f}",
                 f"{(held['fp8_flow'] / held['bf16'] - 1) * 100:+.2f} %"])
    return table(["", *(f"`{recipe}`" for recipe in RECIPES), "flow against bf16"], rows) + \
        source(*(origin(name) for _, name in (LAYERS[0], LAYERS[2], LAYERS[3])), origin("validate_h200_100m.json"))


def baselines():
    """Whole layers of other implementations on one H200: the fastest of each."""
    data = load("peers_layers_h200.json")
    rows = []
    for p in data["peers"]:
        cells = []
        for layer in ("deepseek_v3", "qwen3"):
            one = p[layer]
            cells += [""] if one is None else [f"{one['burst ms']:.2f} / {one['sustained ms']:.2f}"]
        rows.append([p["peer"], p["recipe"], *cells])
    own = load(LAYERS[0][1]), load(LAYERS[1][1])
    rows += [["fp8flow", recipe, *(f"/ {layer_ms(recipe_of(profile, recipe)):.2f}" for profile in own)] for recipe in RECIPES]
    return (table(["implementation", "recipe", "DeepSeek-V3 dimensions, ms", "Qwen3-235B dimensions, ms"], rows, 2) +
            source(f"{link('peers_layers_h200.json')}, {data['date']}, {data['gpu']}; conditions are in the file",
                   f"fp8flow: {link(LAYERS[0][1])}, {link(LAYERS[1][1])}"))


STAGE_ORDER = ["norm", "route", "plan", "cast", "dispatch", "fc1", "swiglu", "fc2", "combine", "shared expert", "transpose",
               "fc2 wgrad", "fc2 dgrad", "fc1 wgrad", "fc1 dgrad", "moe layer"]


def layer_stages():
    """Forward and backward of each stage."""
    profile = load(STAGES)
    arms = {r: stage_ms(recipe_of(profile, r)) for r in RECIPES}
    unknown = {stage for arm in arms.values() for stage, _ in arm} - set(STAGE_ORDER)
    assert not unknown, unknown
    rows = []
    for stage in STAGE_ORDER:
        pairs = [[arms[r].get((stage, d)) for d in ("forward", "backward")] for r in RECIPES]
        if any(any(pair) for pair in pairs):
            cells = [" + ".join(f"{ms:.2f}" if ms else "-" for ms in pair) if any(pair) else "" for pair in pairs]
            rows.append(["between stages" if stage == "moe layer" else stage, *cells])
    rows.append(["sum of medians", *(f"{sum(arms[r].values()):.2f}" for r in RECIPES)])
    rows.append(["end to end, without the stage timer", *(f"{layer_ms(recipe_of(profile, r)):.2f}" for r in RECIPES)])
    return table(["ms, forward + backward", *RECIPES], rows) + source(origin(STAGES))


def schedules():
    """What runs in parallel: passes, cycles, exchange calls, step. One call per file."""
    files = [("DeepSeek-V3 layer", "exposed_deepseek_v3_4gpu.json"), ("the same, BF16 gradients", "exposed_deepseek_v3_4gpu_bf16_gradients.json"),
             ("the same, FP32 gradients, 8 micro-batches", "exposed_deepseek_v3_4gpu_micro_batches.json"), ("107 M model", "exposed_100m_4gpu.json")]
    rows = []
    for label, name in files:
        profile = load(name)
        first = profile["recipes"][0]["passes seconds"]["median"]
        for r in profile["recipes"]:
            passes = r["passes seconds"]["median"]
            rows.append([label, schedule_of(r), f"{passes * 1e3:.2f}", f"{passes / first:.3f}", f"{mhz(r):.0f}", f"{passes * mhz(r):.2f}",
                         f"{r['wire seconds'] * 1e3:.2f}", f"{r['wire seconds alone'] * 1e3:.2f}", f"{r['step seconds'] * 1e3:.2f}"])
    return table(["4 x H200", "schedule", "passes, ms per layer", "of serial", "MHz", "M cycles", "exchange, ms", "alone, ms", "step, ms"], rows, 2) + \
        source(*(origin(name) for _, name in files))


def micro_batches():
    """Accumulating micro-batches: weight gradients of two at once, gradients in BF16."""
    names = {"profile_deepseek_v3_4gpu_pair_false.json": "false", "profile_deepseek_v3_4gpu_pair_true.json": "true"}
    rows = []
    for name, label in names.items():
        r = load(name)["recipes"][0]
        ms = stage_ms(r)
        rows.append([label, f"{layer_ms(r):.2f}", f"{ms['fc1 wgrad', 'backward']:.2f}", f"{ms['fc2 wgrad', 'backward']:.2f}",
                     f"{sum(r['saved bytes'].values()) / 2**30:.2f}"])
    return table(["moe_wgrad_pair_micro_batches", "ms per layer and micro-batch", "fc1 wgrad", "fc2 wgrad", "saved, GiB"], rows) + \
        source(*map(origin, names))


def state_dtypes():
    """Gradients and moments in BF16."""
    name, rows = "profile_deepseek_v3_4gpu_state_dtypes.json", []
    for r in load(name)["recipes"]:
        seconds = {s["stage"]: s["seconds"]["median"] * 1e3 for s in r["rows"] if s["direction"] != "forward"}
        rows.append([schedule_of(r, "fp32 state"), f"{layer_ms(r):.2f}", f"{mhz(r):.0f}", f"{seconds['fc1 wgrad'] + seconds['fc2 wgrad']:.2f}",
                     f"{seconds['optimizer']:.2f}", f"{r['step seconds'] * 1e3:.2f}"])
    return table(["state", "layer, ms", "MHz", "weight gradients", "optimizer", "step"], rows) + source(origin(name))


def saved_rows():
    """What is kept of received rows: memory of a layer and time."""
    names = {f"profile_saved_rows_{key}_h200_x2.json": label for key, label in {
        "worst_case": "sorted, capacity for the worst case", "sorted": "sorted", "received": "received", "none": "none"}.items()}
    rows = []
    for name, label in names.items():
        r = load(name)["recipes"][0]
        rows.append([label, r["routed rows of a layer reserved"], *(f"{r[key] / 2**20:.0f}" for key in (
            "saved bytes used", "saved bytes reserved", "workspace bytes reserved", "activation bytes")), f"{layer_ms(r):.2f}", f"{mhz(r):.0f}"])
    return table(["recompute.saved_rows", "rows reserved", "saved, MiB", "reserved", "workspace reserved", "peak with workspace", "layer, ms", "MHz"],
                 rows) + source(*map(origin, names))


def distributed_optimizer():
    """Optimizer state divided over two ranks."""
    names, rows = {f"profile_distributed_optimizer_{key}_h100_x2.json": label for key, label in {
        "false": "false", "true": "true", "overlapped": "true, wire in parallel with the layers"}.items()}, []
    for name, label in names.items():
        r = load(name)["recipes"][0]
        held = r["parameter bytes"]
        seconds = {s["stage"]: s["seconds"]["median"] * 1e3 for s in r["rows"]}
        rows.append([label, f"{(held['master'] + held['moments']) / 2**20:.0f}", f"{seconds['optimizer']:.2f}",
                     f"{seconds['parameter gather']:.2f}" if "parameter gather" in seconds else "", f"{r['step seconds'] * 1e3:.2f}"])
    return table(["use_distributed_optimizer", "masters, moments, MiB", "optimizer, ms", "gather", "step"], rows) + source(*map(origin, names))


def graphs():
    """A step as a CUDA graph: time of the step, and how long the host is busy."""
    quickstart, larger = "configs/quickstart.yaml", "configs/h200_100m.yaml, 4096 tokens"
    rows = []
    names = {"profile_quickstart_graph_serial_h100.json": (quickstart, "graph"), "profile_quickstart_graph_shared_h100.json": (quickstart, "graph + shared"),
             "profile_100m_graph_serial_h100.json": (larger, "graph"), "profile_100m_graph_shared_h100.json": (larger, "graph + shared")}
    for name, (label, schedule) in names.items():
        for r in load(name)["recipes"]:
            rows.append([label, schedule, f"{r['step seconds'] * 1e3:.2f}", f"{r['host seconds'] * 1e3:.2f}"])
    return table(["one H100", "schedule", "step, ms", "host busy, ms"], rows, 2) + source(*map(origin, names))


def hosts():
    """Four GPUs taken as two hosts, NCCL between them over NVLink."""
    files = {"profile_deepseek_v3_4gpu_hosts_inside.json": "128 experts, EP 2 inside a host", "profile_deepseek_v3_4gpu_hosts_across.json":
             "256 experts, EP 4 across", "profile_deepseek_v3_4gpu_hosts_fixed.json": "the same, messages of a fixed size",
             "profile_deepseek_v3_4gpu_hosts_two_levels.json": "the same, two levels"}
    rows = []
    for name, label in files.items():
        r = load(name)["recipes"][0]
        rows.append([label, f"{layer_ms(r):.2f}", f"{mhz(r):.0f}", f"{r['wire seconds'] * 1e3:.2f}", f"{r['step seconds'] * 1e3:.2f}"])
    return table(["DeepSeek-V3 layer", "layer, ms", "MHz", "exchange, ms", "step, ms"], rows) + source(*map(origin, files))


def whole_model():
    """The step of the 107 M model by stage, per layer where it repeats."""
    name = "profile_100m_1gpu.json"
    arms = [recipe_of(load(name), "fp8_flow"), recipe_of(load(name), "fp8_flow + shared")]

    def ms(recipe, part, direction, stage=None):
        return sum(r["seconds"]["median"] * 1e3 for r in recipe["rows"] if (r["part"], r["direction"]) == (part, direction) and
                   stage in (None, r["stage"]))
    rows = [[f"attention: {stage}", *(f"{ms(a, 'attention', 'forward', stage):.3f} + {ms(a, 'attention', 'backward', stage):.3f}" for a in arms)]
            for stage in ("norm", "qkv", "core attention", "proj")]
    rows.append(["MoE layer, end to end", *(f"{layer_ms(a):.3f}" for a in arms)])
    for label, part, direction in (("embedding, backward", "embedding", "backward"), ("head", "head", "forward"), ("optimizer", "optimizer", "update")):
        rows.append([label, *(f"{ms(a, part, direction):.2f}" for a in arms)])
    rows.append(["step, 8 layers", *(f"{a['step seconds'] * 1e3:.2f}" for a in arms)])
    return table(["ms, forward + backward", "serial", "shared expert in parallel"], rows) + source(origin(name))


TABLES = {f.__name__: f for f in (headline, layers, baselines, layer_stages, schedules, micro_batches, state_dtypes, saved_rows, distributed_optimizer,
                                  graphs, hosts, whole_model)}
