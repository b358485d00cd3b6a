# SPDX-License-Identifier: MIT
"""Tables of docs/performance/layers.md."""
from performance_tables.common import RECIPES, layer_ms, link, load, origin, recipe_of, source, stage_ms, table

LAYERS = [
    ("DeepSeek-V3 dimensions, 32 experts", "profile_deepseek_v3_1gpu.json", 4096),
    ("Qwen3 dimensions, 32 experts", "profile_qwen3_1gpu.json", 8192),
    ("DeepSeek-V3, 256 experts", "profile_deepseek_v3.json", 4096),
    ("the same, another machine", "profile_deepseek_v3_machine2.json", 4096),
    ("DeepSeek-V3, 256 experts", "profile_deepseek_v3_8192.json", 8192),
    ("Qwen3-235B, 128 experts", "profile_qwen3_235b.json", 4096),
    ("Mixtral-8x7B, 8 experts", "profile_mixtral_8x7b.json", 4096),
]


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
    return table(columns, layer_rows(columns)) + source(*lines)


def layers_4gpu():
    columns = ["layer", "tokens a GPU", *RECIPES, "clock", "bf16 / flow", "tokens/s/GPU", "TFLOP/s/GPU", "wire per GPU, bf16, flow"]
    files = [("DeepSeek-V3, 256 experts", "profile_deepseek_v3_4gpu_recipes.json", 4096),
             ("Qwen3-235B, 128 experts", "profile_qwen3_235b_a22b_4gpu.json", 4096), ("Qwen3-30B, 128 experts", "profile_qwen3_30b_a3b_4gpu.json", 4096),
             ("Mixtral-8x7B, 8 experts", "profile_mixtral_8x7b_4gpu.json", 4096), ("DeepSeek-V2-Lite, 64 experts", "profile_deepseek_v2_lite_4gpu.json", 4096)]
    return table(columns, layer_rows(columns, files)) + source(*(origin(name) for _, name, _ in files))


def layers_short():
    """Four rows for docs/performance.md."""
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


TABLES = {
    "layers": layers,
    "layers_short": layers_short,
    "layers_4gpu": layers_4gpu,
    "layer_clock": layer_clock,
    "layer_stages": layer_stages,
    "whole_model": whole_model,
    "model_operations": model_operations,
    "heads": heads,
    "peer_layers": peer_layers,
}
