#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes what documents show of results and of the program. Python's standard library only.

  scripts/make_documents.py                      tables of README.md and docs/ from docs/results, docs/pictures/deepseek_v3_layer.svg
  scripts/make_documents.py --program PROGRAM    docs/configuration.md (fp8flow --help-config), the tables of docs/scaling.md, the families of
                                                 docs/usage/data_and_weights.md (fp8flow families --markdown)

A page marks the place of a table by `<!-- table NAME -->` and `<!-- end NAME -->`; what is between them is
replaced. docs/scaling.md has `<!-- plan`, lines `LABEL: ARGUMENTS`, `-->`, and `<!-- plan ends -->`: one row of
`PROGRAM plan ARGUMENTS --markdown` per recipe, the label in front. --check writes nothing: the exit status is 1,
with the difference, where a page differs, or where it asks for a table that does not exist.

Longer than 600 lines: every table has its function here, and they share the formats of cells and sources.
"""
import collections
import difflib
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import statistics
import sys

import jobs

ROOT = pathlib.Path(jobs.ROOT)
RESULTS = ROOT / "docs" / "results"
RECIPES = ["bf16", "fp8_blockwise", "fp8_flow"]
OURS = re.compile(r"(mpirun -n \d+ )?fp8flow ")  # commands that docs/results/README.md lists


@functools.cache
def load(name):
    return json.loads((RESULTS / name).read_text())


def entries(name):
    data = load(name)
    return data if isinstance(data, list) else [data]


# columns without numbers
TEXTS = {"arm", "balancing loss", "basis", "bench row", "command", "compared with", "fits", "on", "recipe", "schedule", "shape"}


def markdown(lines):
    """Lines of cells, the names first; the first column has no numbers either."""
    rule = ["---" if i == 0 or name in TEXTS else "---:" for i, name in enumerate(lines[0])]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in [lines[0], rule, *lines[1:]])


def source(*names):
    """The line below a table: its files, with the commit and date of most of their rows."""
    def made(name):
        commits = collections.Counter(entry["commit"] for entry in entries(name)).most_common()
        others = "".join(f", {count} of {len(entries(name))} rows from {other}" for other, count in commits[1:])
        return f"({commits[0][0]}{others}, {entries(name)[0]['date'][:10]})"
    groups = [", ".join(f"[{name}](results/{name})" for name in group) + " " + at for at, group in itertools.groupby(names, made)]
    listed = any(OURS.match(entries(name)[0]["command"]) for name in names)
    return f"\n\nFrom {'; '.join(groups)}." + (" [Commands](results/README.md#commands)." if listed else "")


def table(rows, *names):
    """Rows {column: cell} as Markdown, and the files they are from; `filled` makes links relative to the page."""
    rows = list(rows)
    return markdown([list(rows[0]), *(row.values() for row in rows)]) + source(*names)


class Arm:
    """One arm of a profile.json: a recipe or a schedule."""

    def __init__(self, label, profile, data):
        self.label, self.profile, self.data, self.name = label, profile, data, data["name"]
        self.layer = data["layer seconds"]["median"] * 1e3
        self.passes = data.get("passes seconds", {}).get("median", 0) * 1e3
        self.mhz = data["layer clock hertz"]["median"] / 1e6
        self.tokens = round(data["tokens per second per gpu"] * data["layer seconds"]["median"])

    def ms(self, key):
        return f"{self.data[key] * 1e3:.2f}"

    def mib(self, key):
        return f"{self.data[key] / 2**20:.0f}"

    def schedule(self, plain):
        """"graph" of "fp8_flow + graph"; `plain` without a schedule."""
        return self.name.replace("fp8_flow + ", "").replace("fp8_flow", plain)

    def rows(self, part, direction=None, stage=None):
        """Sum of the medians of these rows, ms."""
        wanted = {"part": part, "direction": direction, "stage": stage}
        return sum(row["seconds"]["median"] * 1e3 for row in self.data["rows"]
                   if all(value in (None, row[key]) for key, value in wanted.items()))

    def stage(self, name):
        ms = self.rows(None, None, name)
        return f"{ms:.2f}" if ms else ""

    def both_passes(self, part, stage, digits=2):
        """"forward + backward" in ms, or nothing."""
        pair = [self.rows(part, way, stage) for way in ("forward", "backward")]
        return " + ".join(f"{ms:.{digits}f}" if ms else "-" for ms in pair) if any(pair) else ""


def arms_of(name, label=""):
    return [Arm(label, load(name), data) for data in load(name)["recipes"]]


def recipes_of(name, recipes=RECIPES):
    found = {arm.name: arm for arm in arms_of(name)}
    return [found[recipe] for recipe in recipes]


# ---- whole layers, schedules, memory and whole models
LAYERS = {
    "profile_deepseek_v3_1gpu.json": "DeepSeek-V3 dimensions, 32 experts",
    "profile_qwen3_1gpu.json": "Qwen3-235B dimensions, 32 experts",
    "profile_deepseek_v3_4gpu_recipes.json": "DeepSeek-V3, 256 experts",
    "profile_deepseek_v3_8192.json": "DeepSeek-V3, 256 experts",
    "profile_qwen3_235b_a22b_4gpu.json": "Qwen3-235B, 128 experts",
    "profile_qwen3_30b_a3b_4gpu.json": "Qwen3-30B, 128 experts",
    "profile_mixtral_8x7b_4gpu.json": "Mixtral-8x7B, 8 experts",
    "profile_deepseek_v2_lite_4gpu.json": "DeepSeek-V2-Lite, 64 experts",
}
STAGES = "profile_deepseek_v3_4gpu_recipes.json"  # the layer that is shown stage by stage
WHOLE_MODEL, LOSSES = "profile_qwen3_30b_a3b_20_layers_4gpu.json", "validate_evidence_524m_h200.json"


def layers():
    """One MoE layer under three recipes."""
    rows = []
    for name, label in LAYERS.items():
        bf16, _, flow = arms = recipes_of(name)
        rows.append({"layer": label, "tokens per GPU": flow.tokens, "GPUs": flow.profile["ranks"],
                     **{f"{arm.name}, ms": f"{arm.layer:.2f}" for arm in arms},
                     "MHz, bf16, flow": f"{bf16.mhz:.0f}, {flow.mhz:.0f}", "bf16 / flow": f"**{bf16.layer / flow.layer:.2f}**",
                     "tokens/s/GPU": f"{flow.data['tokens per second per gpu'] / 1e3:.0f} k",
                     "TFLOP/s/GPU": f"{flow.data['flops per second per gpu'] / 1e12:.0f}"})
    return table(rows, *LAYERS)


def headline():
    """README's table: layers, whole models, loss."""
    def row(what, form, cells, compared):
        cells = {f"`{recipe}`": form.format(cells[recipe]) if recipe in cells else "" for recipe in RECIPES}
        return {"": what, **cells, "flow against bf16": compared}

    def faster(what, form, ms):
        return row(what, form, ms, f"**{ms['bf16'] / ms['fp8_flow']:.2f} x**")
    rows, names = [], [name for i, name in enumerate(LAYERS) if i in (0, 2, 3)]
    for name in names:
        arms = recipes_of(name)
        gpus = f"{load(name)['ranks']} GPU{'s' if load(name)['ranks'] > 1 else ''}"
        rows.append(faster(f"MoE layer, {LAYERS[name]}, {gpus}, {arms[0].tokens} tokens each", "{:.2f} ms",
                           {arm.name: arm.layer for arm in arms}))
    rows.append(faster("step of Qwen3-30B-A3B, 20 of 48 layers, 4 GPUs, 32768 tokens each, BF16 state", "{:.0f} ms",
                       {arm["recipe"]: arm["step seconds"] * 1e3 for arm in load(WHOLE_MODEL)["recipes"]}))
    arms = {arm["arm"]: arm for arm in load(LOSSES)["arms"]}
    losses = {recipe: statistics.mean(arms[recipe]["losses"]) for recipe in ("bf16", "fp8_flow")}
    rows.append(row(f"training loss in nats per byte at 524 M tokens, 64 experts, mean of {len(arms['bf16']['losses'])} seeds", "{:.4f}", losses,
                    interval(arms["fp8_flow"]["training_difference"], 2)))
    return table(rows, *names, WHOLE_MODEL, LOSSES)


def baselines():
    """Whole layers of other implementations on one H200, burst / sustained: the fastest of each."""
    name, (first, second) = "peers_layers_h200.json", list(LAYERS)[:2]

    def both(times):
        return f"{times['burst ms']:.2f} / {times['sustained ms']:.2f}" if times else ""
    cells = [[peer["peer"], peer["recipe"], both(peer["deepseek_v3"]), both(peer["qwen3"])] for peer in load(name)["peers"]]
    cells += [["fp8flow", one.name, f"/ {one.layer:.2f}", f"/ {two.layer:.2f}"]
              for one, two in zip(recipes_of(first), recipes_of(second))]
    header = ["implementation", "recipe", "DeepSeek-V3 dimensions, ms", "Qwen3-235B dimensions, ms"]
    return markdown([header, *cells]) + source(name, first, second)


STAGE_ORDER = ["norm", "route", "plan", "cast", "dispatch", "fc1", "swiglu", "fc2", "combine", "shared expert",
               "transpose", "fc2 wgrad", "fc2 dgrad", "fc1 wgrad", "fc1 dgrad", "moe layer"]


def layer_stages():
    """Forward and backward of each stage."""
    def row(what, cell):
        return {"ms, forward + backward": what, **{arm.name: cell(arm) for arm in recipes_of(STAGES)}}
    rows = [row("between stages" if stage == "moe layer" else stage, lambda arm, stage=stage: arm.both_passes("moe layer", stage))
            for stage in STAGE_ORDER]
    rows.append(row("sum of medians", lambda arm: f"{arm.rows('moe layer'):.2f}"))
    rows.append(row("end to end, without the stage timer", lambda arm: f"{arm.layer:.2f}"))
    return table(rows, STAGES)


def whole_model():
    """The step of the 107 M model by part."""
    name = "profile_100m_micro_batches_h200.json"
    parts = load(name)["parts of the step of 4 sequences"]
    parts = [part for part in parts if part["milliseconds"] > 0.2]

    def line(what, key):
        return {"ms": what, **{part["part"]: f"{max(part[key], 0):.2f}" for part in parts}}
    return table([line("time", "milliseconds"), line("above the ceiling", "above ceiling")], name)


WHOLE_MODELS = {WHOLE_MODEL: "Qwen3-30B-A3B, 20 of 48 layers", "profile_deepseek_v2_lite_2gpu.json": "DeepSeek-V2-Lite"}
PARTS = {"attention core": ("attention core",), "its projections, norms": ("attention projections", "attention norm"),
         "experts, router": ("MoE experts", "shared expert", "router and norm", "dense layer"), "exchange": ("MoE exchange",),
         "embedding, head": ("embedding", "final norm", "head"), "optimizer, gradients": ("optimizer", "gradient reduction")}


def whole_models():
    """The steps of published models, and the share of each part."""
    rows = []
    for name, label in WHOLE_MODELS.items():
        for arm in load(name)["recipes"]:
            ms = {part["part"]: part["step seconds"] * 1e3 for part in arm["parts above ceiling"]}
            rows.append({"model": f"{label}, {load(name)['ranks']} GPUs", "recipe": arm["recipe"],
                         "step, ms": f"{arm['step seconds'] * 1e3:.0f}",
                         "tokens/s per GPU": f"{1e-3 / arm['step seconds per token of a gpu']:.1f} k",
                         **{what: percent(sum(ms.get(part, 0) for part in parts) / sum(ms.values()), 0)
                            for what, parts in PARTS.items()}})
    return table(rows, *WHOLE_MODELS)


BLOCK = "profile_block_deepseek_v3_1gpu.json"


def block():
    """Forward and backward of a block with multi-latent attention, by part, without and with FP8 projections."""
    plain, projections = ({arm["recipe"]: arm for arm in run["recipes"]} for run in load(BLOCK)["runs"])
    parts = ("attention core", "attention projections", "MoE experts", "shared expert")

    def line(label, arm, bf16):
        ms = {part["part"]: part["step seconds"] * 1e3 for part in arm["parts above ceiling"]}
        passes = arm["passes seconds"]["median"]
        return {"recipe": label, **{part: f"{ms[part]:.2f}" for part in parts}, "block, ms": f"{passes * 1e3:.2f}",
                "bf16 / this": f"{bf16['passes seconds']['median'] / passes:.2f} x"}
    return table([line("bf16", plain["bf16"], plain["bf16"]), line("fp8_flow", plain["fp8_flow"], plain["bf16"]),
                  line("fp8_flow, FP8 projections", projections["fp8_flow"], projections["bf16"])], BLOCK)


def latent_attention():
    """Core attention of 128 heads of DeepSeek-V3, next to heads of 128."""
    rows = [row for row in load("bench_model_h200.json") if "heads=128" in row["shape"]]
    found = {(row["op"], re.search(r" D=(\d+)", row["shape"])[1]): row for row in rows}
    lines = []
    for depth in ("128", "192"):
        forward, backward = found["attention", depth], found["attention_backward", depth]
        both, peer = (forward[key] + backward[key] for key in ("us", "peer_us"))
        lines.append({"heads (q and k, v)": f"{depth}, 128", "forward, ms": f"{forward['us'] / 1e3:.2f}",
                      "backward, ms": f"{backward['us'] / 1e3:.2f}",
                      "both, TFLOP/s": f"{(forward['flops'] + backward['flops']) / both / 1e6:.0f}",
                      "PyTorch's SDPA, both, ms": f"{peer / 1e3:.2f}"})
    return table(lines, "bench_model_h200.json")


def micro_batch_size():
    """A step of the 107 M model over the size of its micro-batch."""
    name = "profile_100m_micro_batches_h200.json"
    serial = [row for row in load(name)["rows"] if not row["moe_shared_expert_overlap"]]
    sizes = {row["micro_batch_size"]: row for row in serial}

    def line(what, cell):
        return {"sequences of 1024 tokens": what, **{str(size): cell(size, row) for size, row in sizes.items()}}
    return table([line("step, ms", lambda _, row: f"{row['step milliseconds']:.2f}"),
                  line("k tokens/s", lambda size, row: f"{size * 1024 / row['step milliseconds']:.0f}"),
                  line("MoE layer, ms", lambda _, row: f"{row['layer milliseconds']:.2f}")], name)


# ---- tables with a row per arm: pattern of the file names, {label: what the pattern takes}, columns
LABEL, LAYER, MHZ = (lambda arm: arm.label), (lambda arm: f"{arm.layer:.2f}"), (lambda arm: f"{arm.mhz:.0f}")
STEP, WIRE = (lambda arm: arm.ms("step seconds")), (lambda arm: arm.ms("wire seconds"))
BY_ARM = {
    # what runs in parallel: passes, cycles, exchange calls, step
    "schedules": ("exposed_{}.json", {
        "DeepSeek-V3 layer": "deepseek_v3_4gpu", "the same, BF16 gradients": "deepseek_v3_4gpu_bf16_gradients",
        "107 M model": "100m_4gpu"}, {
        "4 x H200": LABEL, "schedule": lambda arm: arm.schedule("serial"),
        "passes, ms per layer": lambda arm: f"{arm.passes:.2f}",
        "of serial": lambda arm: f"{arm.passes / Arm('', {}, arm.profile['recipes'][0]).passes:.3f}", "MHz": MHZ,
        "M cycles": lambda arm: f"{arm.passes * arm.mhz / 1e3:.2f}", "exchange, ms": WIRE,
        "alone, ms": lambda arm: arm.ms("wire seconds alone"), "step, ms": STEP}),
    # accumulating micro-batches: weight gradients of several at once
    "micro_batches": ("profile_deepseek_v3_4gpu_joined_{}.json", {"1": "1", "2": "2", "4": "4"}, {
        "moe_wgrad_micro_batches": LABEL, "ms per layer and micro-batch": LAYER,
        "fc1 wgrad": lambda arm: arm.stage("fc1 wgrad"), "fc2 wgrad": lambda arm: arm.stage("fc2 wgrad"),
        "saved, GiB": lambda arm: f"{sum(arm.data['saved bytes'].values()) / 2**30:.2f}"}),
    # gradients and moments in BF16
    "state_dtypes": ("profile_deepseek_v3_4gpu_state_dtypes.json", {"": ""}, {
        "state": lambda arm: arm.schedule("fp32 state"), "layer, ms": LAYER, "MHz": MHZ,
        "weight gradients": lambda arm: f"{sum(arm.rows('moe layer', None, stage) for stage in ('fc1 wgrad', 'fc2 wgrad')):.2f}",
        "optimizer": lambda arm: arm.stage("optimizer"), "step": STEP}),
    # what is kept of received rows: memory of a layer and time
    "saved_rows": ("profile_saved_rows_{}_h200_x2.json", {
        "sorted, capacity for the worst case": "worst_case", "sorted": "sorted", "received": "received", "none": "none"}, {
        "recompute.saved_rows": LABEL, "rows reserved": lambda arm: arm.data["routed rows of a layer reserved"],
        "saved, MiB": lambda arm: arm.mib("saved bytes used"), "reserved": lambda arm: arm.mib("saved bytes reserved"),
        "workspace reserved": lambda arm: arm.mib("workspace bytes reserved"),
        "peak with workspace": lambda arm: arm.mib("activation bytes"), "layer, ms": LAYER, "MHz": MHZ}),
    # optimizer state divided over two ranks
    "distributed_optimizer": ("profile_distributed_optimizer_{}_h100_x2.json", {
        "false": "false", "true": "true", "true, wire in parallel with the layers": "overlapped"}, {
        "use_distributed_optimizer": LABEL,
        "masters, moments, MiB":
            lambda arm: f"{sum(arm.data['parameter bytes'][key] for key in ('master', 'moments')) / 2**20:.0f}",
        "optimizer, ms": lambda arm: arm.stage("optimizer"), "gather": lambda arm: arm.stage("parameter gather"), "step": STEP}),
    # a step as a CUDA graph: time of the step, and how long the host is busy
    "graphs": ("profile_{}_h100.json", {
        "configs/quickstart.yaml | graph": "quickstart_graph_serial",
        "configs/quickstart.yaml | graph + shared": "quickstart_graph_shared"}, {
        "one H100": lambda arm: arm.label.split(" | ")[0], "schedule": lambda arm: arm.label.split(" | ")[1],
        "step, ms": STEP, "host busy, ms": lambda arm: arm.ms("host seconds")}),
    # four GPUs taken as two hosts, NCCL between them over NVLink
    "hosts": ("profile_deepseek_v3_4gpu_hosts_{}.json", {
        "128 experts, EP 2 inside a host": "inside", "256 experts, EP 4 across": "across",
        "the same, messages of a fixed size": "fixed", "the same, two levels": "two_levels"}, {
        "DeepSeek-V3 layer": LABEL, "layer, ms": LAYER, "MHz": MHZ, "exchange, ms": WIRE, "step, ms": STEP}),
}


def by_arm(name):
    pattern, files, columns = BY_ARM[name]
    arms = [arm for label, part in files.items() for arm in arms_of(pattern.format(part), label)]
    return table([{column: cell(arm) for column, cell in columns.items()} for arm in arms], *map(pattern.format, files.values()))


# ---- kernels
def bench_rows(name, op, words):
    """Rows of a bench.json of this operation that have all of these words in their shape."""
    return [row for row in load(name) if row["op"] == op and set(words.split()) <= set(row["shape"].split())
            and "peer=alltoall" not in row["shape"]]


def bench_row(name, op, words):
    [row] = bench_rows(name, op, words)
    return row


GEMMS = {  # label: words of the shape; after wgrad of the weight gradient
    "forward, N 4096, K 7168": "G=32 N=4096 K=7168",
    "input gradient of fc1, N 7168, K 4096": "G=32 N=7168 K=4096",
    "forward, N 7168, K 2048": "G=32 N=7168 K=2048",
    "wgrad 4096 x 7168, overwrite": "G=32 N=4096 K=7168 mode=overwrite",
    "wgrad 4096 x 7168, accumulate": "G=32 N=4096 K=7168 mode=accumulate",
    "wgrad 4096 x 7168, 8 groups, overwrite": "G=8 N=4096 K=7168 mode=overwrite",
    "wgrad 4096 x 7168, 8 groups, accumulate": "G=8 N=4096 K=7168 mode=accumulate",
}


def gemm():
    """Rates of this project's grouped GEMM and of cuBLASLt, on another H200."""
    own, other = "bench_grouped_gemm_h200.json", "bench_gemm_h200.json"

    def cell(label, kind, name, backend=""):
        op = "grouped_gemm_wgrad" if "wgrad" in label else "grouped_gemm"
        found = bench_rows(name, op, f"M=32768 rows=balanced {GEMMS[label]} type={kind} {backend}")
        flops = 2.0 * 32768 * math.prod(int(size) for size in re.findall(r"[NK]=(\d+)", GEMMS[label]))
        return " / ".join(f"{flops / found[0][us] / 1e6:.0f}" for us in ("us", "us_sustained")) if found else ""
    rows = []
    for label in GEMMS:
        row = {"32,768 rows in 32 groups, TFLOP/s burst / sustained": label}
        for kind in ("fp8", "bf16"):
            row[kind.upper()] = cell(label, kind, own)
            row[f"{kind.upper()}, cuBLASLt"] = cell(label, kind, other, "gemm_backend=cublaslt")
        rows.append(row)
    return table(rows, own, other)


def deepgemm():
    name = "bench_deepgemm_h200.json"
    rows = []
    for row in load(name)["rows grouped, per host"]:
        rows.append({"rows grouped": row["shape"]})
        for host, (us, ratio) in enumerate(zip(row["us"], row["deepgemm / ours"]), 1):
            rows[-1].update({f"ours, host {host}": f"{us:.0f} us", f"DeepGEMM / ours, host {host}": f"{ratio:.3f}"})
    wgrad = [{"FP8 wgrad, accumulated into FP32": row["shape"], "ours, three hosts": "; ".join(map(str, row["us"])) + " us",
              "DeepGEMM / ours": "; ".join(f"{ratio:.3f}" for ratio in row["deepgemm / ours"])}
             for row in load(name)["wgrad accumulated into FP32, per host"]]
    return markdown([list(rows[0]), *(row.values() for row in rows)]) + "\n\n" + table(wgrad, name)


UPSTREAM, LAYER_SUITE = "bench_upstream_h200.json", "bench_layer_h200.json"
MEMORY = [  # label, suite, operation, words of the shape
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


def memory_bound():
    rows = []
    for label, suite, op, words in MEMORY:
        row = bench_row(f"bench_{suite}_h200.json", op, words)
        rows.append({"operation": label, "bench row": f"`{op}`", "us": f"{row['us']:.0f}",
                     "share of its ceiling": f"{row['ceiling_share'] * 100:.0f} %", "suite": suite})
    return table(rows, UPSTREAM, LAYER_SUITE)


def baseline_us():
    """(op, shape, GPUs) -> microseconds of the fastest other implementation measured on H200s."""
    return {(b["op"], b["shape"], b["gpus"]): b["us"] for b in load("baselines_h200.json")["baselines"]}


def upstream_counts():
    data, others = load(UPSTREAM), baseline_us()
    ratios = [others[key] / row["us"] for row in data if (key := (row["op"], row["shape"], row["gpus"])) in others]
    shares = sorted(row["ceiling_share"] for row in data if row.get("ceiling_share") and row["bytes"] >= 64e6)
    return (f"{len(data)} rows. Of the {len(shares)} that move at least 64 MB, half reach "
            f"{shares[len(shares) // 2] * 100:.0f} % of their ceiling or more.\n"
            f"{len(ratios)} rows have a baseline measured on an H200; {sum(ratio >= 1 for ratio in ratios)} of them take no "
            f"longer than the baseline, the slowest takes {1 / min(ratios):.3f} times its time."
            + source(UPSTREAM, "baselines_h200.json"))


EXCHANGES = {gpus: f"bench_exchange_h200_x{gpus}.json" for gpus in (8, 4, 2)}
CALLS = {"dispatch FP8": ("dispatch", "wire=fp8"), "dispatch BF16": ("dispatch", "wire=bf16"),
         "combine BF16": ("combine", "part=whole order=rank dprob=no")}


def exchange():
    rows = []
    for gpus, tokens, (label, (op, words)) in itertools.product(EXCHANGES, (4096, 8192), CALLS.items()):
        row = bench_row(EXCHANGES[gpus], op, f"T={tokens} {words} sms=0 dispatcher=flex")
        other = baseline_us().get((op, row["shape"].replace(" peer=none", ""), gpus))
        rows.append({"": label, "tokens": tokens, "GPUs": gpus, "us": f"{row['us']:.0f}",
                     "wire, GB/s": f"{row['wire_bytes'] / row['us'] / 1e3:.0f}",
                     "share of ceiling": f"{row['ceiling_share'] * 100:.0f} %", "DeepEP V2, us": f"{other:.0f}" if other else ""})
    return table(rows, *EXCHANGES.values())


def exchange_sms():
    rows, calls = [], (CALLS["dispatch FP8"], ("combine", "part=whole dprob=no"))
    for (gpus, name), (op, words) in itertools.product(EXCHANGES.items(), calls):
        times = {sms: bench_row(name, op, f"T=4096 {words} sms={sms} dispatcher=flex")["us"] for sms in (8, 16, 24, 32, 64, 132)}
        rows.append({"SMs (4096 tokens)": f"{op}, {gpus} GPUs, us", **{sms: f"{us:.0f}" for sms, us in times.items()}})
    return table(rows, *EXCHANGES.values())


def slow_operations():
    """Operations of four whole models below 70 % of their ceiling."""
    name = "bench_model_h200.json"
    return table([{"operation": row["op"], "shape": row["shape"], "us": f"{row['us']:.1f}",
                   "ceiling, us": f"{row['ceiling_us']:.1f}", "share": f"{row['ceiling_share'] * 100:.0f} %"}
                  for row in load(name) if row.get("ceiling_us") and row["ceiling_share"] < 0.7 and "heads=128" not in row["shape"]], name)


# ---- losses, copies, and comparisons with transformers
RUNS = {"quickstart_recipes.json": "quickstart, 2 CPU ranks", "quickstart_recipes_h200.json": "quickstart, one H200"}


def percent(share, digits=3):
    return "" if share is None else f"{share * 100:.{digits}f} %"


def loss():
    """Recipes against bf16 over a training: final held-out loss, errors of the smoothed loss, verdict."""
    return table([{"run": label, "recipe": arm["arm"], "held-out loss": f"{arm['held out']:.4f}",
                   "largest error": percent(arm.get("max relative error")), "mean error": percent(arm.get("mean relative error")),
                   "casts per step": arm["casts per step"], "wire, MiB per step": f"{arm['wire bytes per step'] / 2**20:.2f}",
                   "saved, MiB": f"{arm['saved bytes'] / 2**20:.1f}", "verdict": arm["verdict"]}
                  for name, label in RUNS.items() for arm in load(name)["arms"]], *RUNS)


def interval(of, digits=3):
    """A difference with its 95 % interval, from validate.json."""
    low, high = of["interval_percent"]  # None: one held-out loss has no interval
    mean = round(of["mean_percent"], digits) + 0.0  # not -0.0
    return f"{mean:+.{digits}f}" + (f" ± {(high - low) / 2:.{digits}f} %" if high is not None else " %")


def differences(name):
    """What validate finds of each arm."""
    return table([{"arm": arm["name"], "compared with": arm["against"], "training loss": interval(arm["training_difference"]),
                   "held-out loss": interval(arm["held_out_difference"]),
                   "detects": f"{arm['training_difference']['detectable_percent']:.2f} %"}
                  for arm in load(name)["arms"] if "against" in arm], name)


def losses(name):
    """What the arms of a validation reach."""
    return table([{"recipe": arm["name"], "training loss": f"{statistics.mean(arm['losses']):.4f}", "held-out loss": f"{arm['held out']:.4f}",
                   "step, ms": f"{arm['seconds per step'] * 1e3:.0f}"} for arm in load(name)["arms"]], name)


def family_errors():
    """Norm-wise errors of one layer of every family: output, gradients of experts and router."""
    name = "compare_torch_families.json"
    data = load(name)
    which = [(what, data["errors"].index(what)) for what in ("output", "d experts", "d router")]
    return table([{"layer": row["family"], **{f"{arm}: {what}": f"{errors[i]:.1e}" for arm, errors in row.items()
                                              if arm != "family" for what, i in which}} for row in data["families"]], name)


def models_with_transformers():
    """Errors of whole models against PyTorch in FP64, with PyTorch's own errors after a slash, and of an export in transformers."""
    name, rows = "compare_training_cpu.json", []
    data = load(name)
    exported = {row["family"]: row for row in data["predictions"]}
    pairs = [(data["arms"].index(ours), data["arms"].index(theirs))
             for ours, theirs in (("bf16", "torch bf16"), ("fp8_flow", "torch fp8"))]
    for model in (model for model in data["comparisons"] if "all experts" in model):  # without a balancing loss
        export = exported[model["family"]]
        figures = {"loss": [f"{value:.1e}" for value in model["mean loss"]],
                   "median d": [f"{value:.1e}" for value in model["d median"]],
                   "worst d": [value.split()[1] for value in model["all experts"]["worst d"]]}
        rows.append({"model": model["family"], **{f"{what}: {data['arms'][ours]}": f"{of[ours]} / {of[theirs]}"
                                                  for what, of in figures.items() for ours, theirs in pairs},
                     "export: loss": f"{export['loss'] - export['loss, transformers']:+.0e}",
                     "tokens alike": export["greedy tokens alike"]})
    return table(rows, name) + f" {data['steps']} steps of {data['tokens per step']} tokens."


def transposed():
    """Values that transposed copies lose, over the iterations of a training."""
    name, rows = "transposed_quickstart_cpu.json", []
    for tensor in ("dye^T", "dh^T", "a^T", "xe^T"):
        found = [row for step in load(name)["iterations"] for row in step["transposed"] if row["tensor"] == tensor]
        values, flushed = (sum(row[key] for row in found) for key in ("nonzero", "flushed"))
        rows.append({"copy": tensor, "values not 0": f"{values / 1e6:.1f} M", "flushed": percent(flushed / values, 5),
                     "largest share of a norm^2": f"{max(row['flushed norm share'] for row in found):.1e}",
                     "largest NMSE": f"{max(row['nmse'] for row in found):.1e}"})
    return table(rows, name)


# ---- docs/results/README.md: the command that measures each file of the program again
PLACES = re.compile(r" --(overwrite|(backend|out|peers) \S+)")  # do not change what is measured


def measured_on(item):
    """GPUs of a result: "4 x H200", or "2 CPU ranks"."""
    machine = item.get("machine") or {}
    gpu = item.get("gpu") or machine.get("gpu")
    count = item.get("gpus") or item.get("ranks") or machine.get("ranks")
    if not gpu:
        return f"{count} CPU ranks"
    return (f"{count} x " if count > 1 else "") + re.search(r"H\d+", gpu)[0]


def commands():
    """One row per result of `fp8flow`; `defaults then`: settings that were defaults when the file was made."""
    found = {path.name: entries(path.name)[0] for path in sorted(RESULTS.glob("*.json"))}
    found = {name: item for name, item in found.items() if OURS.match(item.get("command", ""))}

    def command(item):
        return shlex.join(shlex.split(f"{PLACES.sub('', item['command'])} {item.get('defaults then', '')}"))
    lines = [[f"[{name}]({name})", measured_on(item), f"`{command(item)}`"] for name, item in found.items()]
    return markdown([["file", "on", "command"], *lines])


TABLES = {**{make.__name__: make for make in (
    headline, layers, baselines, layer_stages, whole_model, whole_models, block, latent_attention, micro_batch_size, gemm, deepgemm, memory_bound, upstream_counts,
    exchange, exchange_sms, slow_operations, loss, family_errors, models_with_transformers, transposed, commands)},
    **{name: functools.partial(by_arm, name) for name in BY_ARM},
    "planted_faults": functools.partial(differences, "validate_planted_faults_h200.json"),
    "evidence": functools.partial(differences, "validate_evidence_h200.json"),
    "evidence_524m": functools.partial(differences, LOSSES),
    "fixed_routing": functools.partial(differences, "validate_evidence_routing_h200.json"),
    "deepseek_v2_lite": functools.partial(losses, "validate_deepseek_v2_lite_h200_x2.json")}


# ---- the picture docs/pictures/deepseek_v3_layer.svg
PICTURE = ROOT / "docs" / "pictures" / "deepseek_v3_layer.svg"
# The colours of report.html: a stage has the same one in every picture.
COLORS = json.loads(re.search(r"const COLORS = (\{.*?\});", (ROOT / "model/report/page/page.html").read_text(), re.S)[1])
GROUPS = {  # label: stages; the first stage names the colour
    "dispatch, combine": ["dispatch", "combine"], "fc1, fc2 forward": ["fc1", "fc2"],
    "fc1, fc2 dgrad": ["fc1 dgrad", "fc2 dgrad"], "fc1, fc2 wgrad": ["fc1 wgrad", "fc2 wgrad"],
    "shared expert": ["shared expert"], "swiglu": ["swiglu"], "cast": ["cast"], "transpose": ["transpose"],
    "norm, route, plan, rest": ["norm", "route", "plan", "moe layer"],
}
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}"
 role="img" font-family="DejaVu Sans, Arial, sans-serif">
<title>Time of the DeepSeek-V3 MoE layer on four H200s by recipe and stage</title>
<style>.t{{fill:#1f2937}}.s{{fill:#4b5563}}@media (prefers-color-scheme: dark){{.t{{fill:#e5e7eb}}.s{{fill:#b6bec9}}}}</style>
{2}
</svg>
"""


def picture():
    arms, out = recipes_of(STAGES), []
    width, left, bar, pitch, top = 960, 150, 46, 68, 128
    scale = (width - left - 110) / max(arm.rows("moe layer") for arm in arms)
    height = top + len(arms) * pitch + 44

    def text(x, y, words, size, look):
        out.append(f'<text x="{x:.0f}" y="{y:.0f}" {look} font-size="{size}">{words}</text>')

    def box(x, y, width, height, stages, title=""):
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{COLORS[stages[0]]}">{title}</rect>')

    text(24, 34, "DeepSeek-V3 MoE layer, forward + backward, ms", 18, 'class="t" font-weight="bold"')
    profile = arms[0].profile
    text(24, 56, f'4 x {profile["machine"]["device"]}, 256 experts, top-8, 4096 tokens per GPU, balanced routing; medians '
         f'of {profile["steps"]} steps, commit {profile["commit"]}', 12.5, 'class="s"')
    for i, (label, stages) in enumerate(GROUPS.items()):  # five in a row
        x, y = 24 + i % 5 * 184, 82 + i // 5 * 20
        box(x, y - 10, 12, 12, stages)
        text(x + 17, y, label, 12, 'class="s"')
    for y, arm in zip(itertools.count(top, pitch), arms):
        x = left
        text(left - 12, y + bar / 2 + 5, arm.name, 14, 'class="t" text-anchor="end"')
        for label, stages in GROUPS.items():
            ms = sum(arm.rows("moe layer", None, stage) for stage in stages)
            if ms > 0:
                box(x, y, ms * scale, bar, stages, f"<title>{label}: {ms:.2f} ms</title>")
            if ms * scale > 34:
                text(x + ms * scale / 2, y + bar / 2 + 4, f"{ms:.2f}", 12, 'fill="#ffffff" text-anchor="middle"')
            x += ms * scale
        text(x + 10, y + bar / 2 + 6, f"{arm.layer:.2f} ms", 17, 'class="t" font-weight="bold"')
    text(24, height - 18, "Bars: medians of the stages under the stage timer. Bold: end to end, measured in a second pass "
         "without it.", 12, 'class="s"')
    return SVG.format(width, height, "\n".join(out))


# ---- from the program: docs/configuration.md, docs/scaling.md
def keys(help_config):
    """Of `fp8flow --help-config`: sections begin a line, keys follow two blanks, what is said of a key six."""
    out = []
    for section, text in re.findall(r"^([a-z]+):\n((?:  .*\n)+)", help_config, re.M):
        out.append(f"\n## {section}\n\n| key | values | default | meaning |\n|---|---|---|---|")
        for name, values, default, said in re.findall(r"^  (\w+): (.*?)(?:; default (.*))?\n((?: {6}.*\n)*)", text, re.M):
            lines = sorted(map(str.strip, said.splitlines()), key=lambda line: line.startswith("recipes: "))
            meaning = " ".join(lines).replace(" recipes: ", ". Recipes: ")
            cells = [f"`{name}`", values, f"`{default}`" if default else "", meaning]
            out.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(out) + "\n"


def plan_table(program, runs):
    """One table of several plans; a run inside a host has no column of the rows between hosts."""
    rows = []
    for run in runs.strip().splitlines():
        label, arguments = run.split(":", 1)
        lines = jobs.run([program, "plan", *shlex.split(arguments), "--markdown"], cwd=ROOT).splitlines()
        names, _, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        rows += [({"model": label.strip()} if label else {}) | dict(zip(names, cells)) for cells in found]
    return markdown([list(rows[0]), *([row.get(name, "-") for name in rows[0]] for row in rows)]) + "\n"


# ---- pages
MARK = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end \1 -->", re.S)
KEYS = re.compile(r"(<!-- keys -->\n).*", re.S)
FAMILIES = re.compile(r"(<!-- families -->\n).*?(<!-- families end -->)", re.S)
PLAN = re.compile(r"(<!-- plan\n(.*?)-->\n)(.*?)(<!-- plan ends -->)", re.S)


def filled(page):
    text, name = page.read_text(), page.relative_to(ROOT)
    opened, closed = re.findall(r"<!-- table (\w+) -->", text), re.findall(r"<!-- end (\w+) -->", text)
    if opened != closed:
        sys.exit(f"{name}: marks do not pair: {opened} and {closed}")
    unknown = [table for table in opened if table not in TABLES]
    if unknown:
        sys.exit(f"{name}: no such table: {', '.join(unknown)}; there are {', '.join(TABLES)}")
    to_results = os.path.relpath(RESULTS, page.parent)

    def made(match):
        body = TABLES[match[1]]().replace("](results/", f"]({to_results}/")
        return f"<!-- table {match[1]} -->\n{body}\n<!-- end {match[1]} -->"
    return MARK.sub(made, text)


def from_program(program):
    configuration, scaling, weights = (ROOT / "docs" / name for name in (
        "configuration.md", "scaling.md", "usage/data_and_weights.md"))
    families = jobs.run([program, "families", "--markdown"])
    return {weights: FAMILIES.sub(lambda mark: mark[1] + families + mark[2], weights.read_text()),
            configuration: KEYS.sub(lambda mark: mark[1] + keys(jobs.run([program, "--help-config"])), configuration.read_text()),
            scaling: PLAN.sub(lambda mark: mark[1] + "\n" + plan_table(program, mark[2]) + "\n" + mark[4],
                              scaling.read_text())}


def main():
    parser = jobs.command_line(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs")
    parser.add_argument("--program", type=os.path.abspath, help="instead: the pages that come from this fp8flow")
    options = parser.parse_args()
    if options.program:
        wanted = from_program(options.program)
    else:
        wanted = {page: filled(page) for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
        wanted[PICTURE] = picture()
    different = {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}
    for path, text in different.items():
        name = path.relative_to(ROOT)
        if options.check:
            sys.stderr.writelines(difflib.unified_diff(path.read_text().splitlines(True), text.splitlines(True), str(name),
                                                       "wanted", n=1))
            print(f"{name} differs; run scripts/make_documents.py", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"wrote {name}")
    if options.check:
        print(f"{len(wanted) - len(different)} of {len(wanted)} files agree")
    return 1 if options.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
