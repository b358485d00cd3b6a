# SPDX-License-Identifier: MIT
"""Tables of whole layers, schedules, memory and whole models: docs/performance.md and docs/performance/layers.md."""
import functools
import json
import re

from performance_tables.common import RECIPES, ROOT, layer_ms, link, load, origin, recipe_of, schedule_of, source, stage_ms, table

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


# ---- tables with a row per arm: files with labels, and what the columns hold. A column is a title and a function of (label, arm, profile).
def ms(key):
    return lambda label, arm, profile: f"{arm[key] * 1e3:.2f}"


def mib(key):
    return lambda label, arm, profile: f"{arm[key] / 2**20:.0f}"


def stages(*names, missing=None):
    """Sum of stages that run in one direction, ms."""
    def value(label, arm, profile):
        seconds = {row["stage"]: row["seconds"]["median"] for row in arm["rows"]}
        return "" if missing is not None and names[0] not in seconds else f"{sum(seconds[name] for name in names) * 1e3:.2f}"
    return value


def label_of(label, arm, profile):
    return label


def schedule(plain):
    return lambda label, arm, profile: schedule_of(arm, plain)


def passes(arm):
    return arm["passes seconds"]["median"]


LAYER, MHZ = (lambda label, arm, profile: f"{layer_ms(arm):.2f}"), (lambda label, arm, profile: f"{mhz(arm):.0f}")
STATE = lambda label, arm, profile: f"{(arm['parameter bytes']['master'] + arm['parameter bytes']['moments']) / 2**20:.0f}"  # noqa: E731
EXPOSED, PAIR, SAVED, STATES, HOSTS = ("exposed_{}.json", "profile_deepseek_v3_4gpu_pair_{}.json", "profile_saved_rows_{}_h200_x2.json",
                                       "profile_distributed_optimizer_{}_h100_x2.json", "profile_deepseek_v3_4gpu_hosts_{}.json")
BY_ARM = {  # name: (files by label, every arm of a file or the first, columns)
    # what runs in parallel: passes, cycles, exchange calls, step
    "schedules": ([("DeepSeek-V3 layer", EXPOSED.format("deepseek_v3_4gpu")),
                   ("the same, BF16 gradients", EXPOSED.format("deepseek_v3_4gpu_bf16_gradients")),
                   ("the same, FP32 gradients, 8 micro-batches", EXPOSED.format("deepseek_v3_4gpu_micro_batches")),
                   ("107 M model", EXPOSED.format("100m_4gpu"))], True,
                  {"4 x H200": label_of, "schedule": schedule("serial"), "passes, ms per layer": lambda _, arm, p: f"{passes(arm) * 1e3:.2f}",
                   "of serial": lambda _, arm, p: f"{passes(arm) / passes(p['recipes'][0]):.3f}", "MHz": MHZ,
                   "M cycles": lambda _, arm, p: f"{passes(arm) * mhz(arm):.2f}", "exchange, ms": ms("wire seconds"),
                   "alone, ms": ms("wire seconds alone"), "step, ms": ms("step seconds")}),
    # accumulating micro-batches: weight gradients of two at once
    "micro_batches": ([("false", PAIR.format("false")), ("true", PAIR.format("true"))], False,
                      {"moe_wgrad_pair_micro_batches": label_of, "ms per layer and micro-batch": LAYER, "fc1 wgrad": stages("fc1 wgrad"),
                       "fc2 wgrad": stages("fc2 wgrad"), "saved, GiB": lambda _, arm, p: f"{sum(arm['saved bytes'].values()) / 2**30:.2f}"}),
    # gradients and moments in BF16
    "state_dtypes": ([("", "profile_deepseek_v3_4gpu_state_dtypes.json")], True,
                     {"state": schedule("fp32 state"), "layer, ms": LAYER, "MHz": MHZ, "weight gradients": stages("fc1 wgrad", "fc2 wgrad"),
                      "optimizer": stages("optimizer"), "step": ms("step seconds")}),
    # what is kept of received rows: memory of a layer and time
    "saved_rows": ([("sorted, capacity for the worst case", SAVED.format("worst_case")), ("sorted", SAVED.format("sorted")),
                    ("received", SAVED.format("received")), ("none", SAVED.format("none"))], False,
                   {"recompute.saved_rows": label_of, "rows reserved": lambda _, arm, p: arm["routed rows of a layer reserved"],
                    "saved, MiB": mib("saved bytes used"), "reserved": mib("saved bytes reserved"),
                    "workspace reserved": mib("workspace bytes reserved"), "peak with workspace": mib("activation bytes"), "layer, ms": LAYER,
                    "MHz": MHZ}),
    # optimizer state divided over two ranks
    "distributed_optimizer": ([("false", STATES.format("false")), ("true", STATES.format("true")),
                               ("true, wire in parallel with the layers", STATES.format("overlapped"))], False,
                              {"use_distributed_optimizer": label_of, "masters, moments, MiB": STATE, "optimizer, ms": stages("optimizer"),
                               "gather": stages("parameter gather", missing=""), "step": ms("step seconds")}),
    # a step as a CUDA graph: time of the step, and how long the host is busy
    "graphs": ([("configs/quickstart.yaml | graph", "profile_quickstart_graph_serial_h100.json"),
                ("configs/quickstart.yaml | graph + shared", "profile_quickstart_graph_shared_h100.json"),
                ("configs/h200_100m.yaml, 4096 tokens | graph", "profile_100m_graph_serial_h100.json"),
                ("configs/h200_100m.yaml, 4096 tokens | graph + shared", "profile_100m_graph_shared_h100.json")], True,
               {"one H100": lambda label, arm, p: label.split(" | ")[0], "schedule": lambda label, arm, p: label.split(" | ")[1],
                "step, ms": ms("step seconds"), "host busy, ms": ms("host seconds")}),
    # four GPUs taken as two hosts, NCCL between them over NVLink
    "hosts": ([("128 experts, EP 2 inside a host", HOSTS.format("inside")), ("256 experts, EP 4 across", HOSTS.format("across")),
               ("the same, messages of a fixed size", HOSTS.format("fixed")), ("the same, two levels", HOSTS.format("two_levels"))], False,
              {"DeepSeek-V3 layer": label_of, "layer, ms": LAYER, "MHz": MHZ, "exchange, ms": ms("wire seconds"), "step, ms": ms("step seconds")}),
}


def by_arm(name):
    files, every, columns = BY_ARM[name]
    rows = []
    for label, file in files:
        profile = load(file)
        for arm in profile["recipes"] if every else profile["recipes"][:1]:
            rows.append([value(label, arm, profile) for value in columns.values()])
    return table(list(columns), rows, 2 if name in ("schedules", "graphs") else 1) + source(*(origin(file) for _, file in files))


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


TABLES = {**{f.__name__: f for f in (headline, layers, baselines, layer_stages, whole_model)},
          **{name: functools.partial(by_arm, name) for name in BY_ARM}}


# ---- the picture docs/pictures/deepseek_v3_layer.svg
PICTURE = ROOT / "docs" / "pictures" / "deepseek_v3_layer.svg"
# The colours of report.html: a stage has the same one in every picture.
COLORS = json.loads(re.search(r"const COLORS = (\{.*?\});", (ROOT / "model/report/page/page.html").read_text(), re.S)[1])
GROUPS = [  # label, stages; the first stage names the colour
    ("dispatch, combine", ["dispatch", "combine"]),
    ("fc1, fc2 forward", ["fc1", "fc2"]),
    ("fc1, fc2 dgrad", ["fc1 dgrad", "fc2 dgrad"]),
    ("fc1, fc2 wgrad", ["fc1 wgrad", "fc2 wgrad"]),
    ("shared expert", ["shared expert"]),
    ("swiglu", ["swiglu"]),
    ("cast", ["cast"]),
    ("transpose", ["transpose"]),
    ("norm, route, plan, rest", ["norm", "route", "plan", "moe layer"]),
]


def picture():
    profile = load(STAGES)
    width, left, right, bar, gap, top = 960, 150, 110, 46, 22, 128
    scale = (width - left - right) / max(sum(stage_ms(recipe_of(profile, r)).values()) for r in RECIPES)
    height = top + len(RECIPES) * (bar + gap) + 44
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
           f'font-family="DejaVu Sans, Arial, sans-serif">',
           "<title>Time of the DeepSeek-V3 MoE layer on four H200s by recipe and stage</title>",
           "<style>.t{fill:#1f2937}.s{fill:#4b5563}@media (prefers-color-scheme: dark){.t{fill:#e5e7eb}.s{fill:#b6bec9}}</style>",
           '<text x="24" y="34" class="t" font-size="18" font-weight="bold">DeepSeek-V3 MoE layer, forward + backward, ms</text>',
           f'<text x="24" y="56" class="s" font-size="12.5">4 x {profile["machine"]["device"]}, 256 experts, top-8, 4096 tokens per GPU, balanced '
           f'routing; medians of {profile["steps"]} steps, commit {profile["commit"]}</text>']
    x, y = 24, 82
    for label, members in GROUPS:
        step = 24 + 7.4 * len(label) + 12
        if x + step > width - 16:
            x, y = 24, y + 20
        out.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{COLORS[members[0]]}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="{y}" class="s" font-size="12">{label}</text>')
        x += step
    for i, name in enumerate(RECIPES):
        recipe = recipe_of(profile, name)
        stages = stage_ms(recipe)
        y = top + i * (bar + gap)
        out.append(f'<text x="{left - 12}" y="{y + bar / 2 + 5:.0f}" class="t" font-size="14" text-anchor="end">{name}</text>')
        x = float(left)
        for label, members in GROUPS:
            ms = sum(v for (stage, _), v in stages.items() if stage in members)
            if ms == 0:
                continue
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{ms * scale:.1f}" height="{bar}" fill="{COLORS[members[0]]}"><title>{label}: {ms:.2f} ms</title></rect>')
            if ms * scale > 34:
                out.append(f'<text x="{x + ms * scale / 2:.1f}" y="{y + bar / 2 + 4:.0f}" fill="#ffffff" font-size="12" '
                           f'text-anchor="middle">{ms:.2f}</text>')
            x += ms * scale
        out.append(f'<text x="{x + 10:.1f}" y="{y + bar / 2 + 6:.0f}" class="t" font-size="17" font-weight="bold">{layer_ms(recipe):.2f} ms</text>')
    out.append(f'<text x="24" y="{height - 18}" class="s" font-size="12">Bars: medians of the stages under the stage timer. Bold: end to end, '
               'measured in a second pass without it.</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"
