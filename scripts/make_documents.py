#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes what documents show of results and of the program. Python's standard library only.

  scripts/make_documents.py                      tables of README.md and docs/ from docs/results, docs/pictures/deepseek_v3_layer.svg
  scripts/make_documents.py --program PROGRAM    docs/configuration.md (fp8flow --help-config) and the tables of docs/scaling.md

A page marks the place of a table by `<!-- table NAME -->` and `<!-- end NAME -->`; what is between them is
replaced. docs/scaling.md has `<!-- plan`, lines `LABEL: ARGUMENTS`, `-->`, and `<!-- plan ends -->`: one row of
`PROGRAM plan ARGUMENTS --markdown` per recipe, the label in front. --check writes nothing: the exit status is 1,
with the difference, where a page differs, or where it asks for a table that does not exist. Over 600 lines: most
of it is a list of tables that share the helpers at the top; no table depends on another.
"""
import argparse
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
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
RECIPES = ["bf16", "fp8_blockwise", "fp8_flow"]


def load(name):
    return json.loads((RESULTS / name).read_text())


def table(header, rows, align_from=1):
    """A Markdown table; columns from align_from on are numbers."""
    rule = ["---" if i < align_from else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in [header, rule, *rows])


def source(*parts, commands=True):
    """The line below a table; commands: docs/results/README.md has the commands of the files."""
    return f"\n\nFrom {'; '.join(parts)}." + (" [Commands](results/README.md#commands)." if commands else "")


def link(name):
    return f"[{name}](results/{name})"  # `filled` makes it relative to the page


def origin(*names):
    """Links of files; neighbours of the same commit and date share a bracket."""
    def made(name):
        data = load(name)
        rows = data if isinstance(data, list) else [data]
        numbers = collections.Counter(row["commit"] for row in rows).most_common()
        commit = numbers[0][0] + "".join(f", {count} of {len(rows)} rows from {other}" for other, count in numbers[1:])
        return f"({commit}, {rows[0]['date'][:10]})"
    return "; ".join(", ".join(map(link, group)) + " " + at for at, group in itertools.groupby(names, made))


class Arm:
    """One arm of a profile.json: a recipe or a schedule."""

    def __init__(self, label, profile, data):
        self.label, self.profile, self.data = label, profile, data
        self.layer = data["layer seconds"]["median"] * 1e3
        self.mhz = data["layer clock hertz"]["median"] / 1e6
        self.tokens = round(data["tokens per second per gpu"] * data["layer seconds"]["median"])

    def ms(self, key):
        return f"{self.data[key] * 1e3:.2f}"

    def mib(self, key):
        return f"{self.data[key] / 2**20:.0f}"

    def passes(self):
        return self.data["passes seconds"]["median"] * 1e3

    def schedule(self, plain):
        """"graph" of "fp8_flow + graph"; `plain` without a schedule."""
        return self.data["name"].replace("fp8_flow + ", "").replace("fp8_flow", plain)

    def rows(self, part, direction=None, stage=None):
        """Sum of the medians of these rows, ms."""
        return sum(row["seconds"]["median"] * 1e3 for row in self.data["rows"]
                   if row["part"] == part and direction in (None, row["direction"]) and stage in (None, row["stage"]))

    def stage(self, name):
        """Sum of the rows with this stage's name, ms; empty where there is none."""
        found = [row["seconds"]["median"] for row in self.data["rows"] if row["stage"] == name]
        return f"{sum(found) * 1e3:.2f}" if found else ""


def arms_of(label, name):
    profile = load(name)
    return [Arm(label, profile, data) for data in profile["recipes"]]


def recipes_of(name, recipes=RECIPES):
    found = {arm.data["name"]: arm for arm in arms_of("", name)}
    return [found[recipe] for recipe in recipes]


# ---- whole layers, schedules, memory and whole models
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


def layers():
    """One MoE layer under three recipes."""
    rows = []
    for label, name in LAYERS:
        bf16, blockwise, flow = recipes_of(name)
        rows.append([label, flow.tokens, flow.profile["ranks"], *(f"{arm.layer:.2f}" for arm in (bf16, blockwise, flow)),
                     f"{bf16.mhz:.0f}, {flow.mhz:.0f}", f"**{bf16.layer / flow.layer:.2f}**",
                     f"{flow.data['tokens per second per gpu'] / 1e3:.0f} k",
                     f"{flow.data['flops per second per gpu'] / 1e12:.0f}"])
    return table(["layer", "tokens per GPU", "GPUs", *(f"{recipe}, ms" for recipe in RECIPES), "MHz, bf16, flow",
                  "bf16 / flow", "tokens/s/GPU", "TFLOP/s/GPU"], rows) + source(origin(*(name for _, name in LAYERS)))


WHOLE_MODEL = "profile_qwen3_30b_a3b_20_layers_4gpu.json"


def headline():
    """README's table: layers, whole models, loss."""
    rows, names = [], []
    for label, name in (LAYERS[0], LAYERS[2], LAYERS[3]):
        arms = recipes_of(name)
        gpus = arms[0].profile["ranks"]
        rows.append([f"MoE layer, {label}, {gpus} GPU{'s' if gpus > 1 else ''}, {arms[-1].tokens} tokens each",
                     *(f"{arm.layer:.2f} ms" for arm in arms), f"**{arms[0].layer / arms[-1].layer:.2f} x**"])
        names.append(name)
    whole = {arm["recipe"]: arm["step seconds"] * 1e3 for arm in load(WHOLE_MODEL)["recipes"]}
    rows.append(["step of Qwen3-30B-A3B, 20 of 48 layers, 4 GPUs, 32768 tokens each, BF16 state", f"{whole['bf16']:.0f} ms", "",
                 f"{whole['fp8_flow']:.0f} ms", f"**{whole['bf16'] / whole['fp8_flow']:.2f} x**"])
    held = {arm["arm"]: arm["held out"] for arm in load("validate_h200_100m.json")["arms"]}
    rows.append(["held-out loss of a 107 M model after 1000 iterations, 4 GPUs", f"{held['bf16']:.4f}", "",
                 f"{held['fp8_flow']:.4f}", f"{(held['fp8_flow'] / held['bf16'] - 1) * 100:+.2f} %"])
    return (table(["", *(f"`{recipe}`" for recipe in RECIPES), "flow against bf16"], rows) +
            source(origin(*names, WHOLE_MODEL, "validate_h200_100m.json")))


def baselines():
    """Whole layers of other implementations on one H200: the fastest of each."""
    data, (first, second) = load("peers_layers_h200.json"), (name for _, name in LAYERS[:2])
    rows = [[peer["peer"], peer["recipe"],
             *(f"{peer[layer]['burst ms']:.2f} / {peer[layer]['sustained ms']:.2f}" if peer[layer] else ""
               for layer in ("deepseek_v3", "qwen3"))] for peer in data["peers"]]
    rows += [["fp8flow", one.data["name"], f"/ {one.layer:.2f}", f"/ {two.layer:.2f}"]
             for one, two in zip(recipes_of(first), recipes_of(second))]
    return (table(["implementation", "recipe", "DeepSeek-V3 dimensions, ms", "Qwen3-235B dimensions, ms"], rows, 2) +
            source(f"{link('peers_layers_h200.json')}, {data['date']}, {data['gpu']}; conditions are in the file",
                   f"fp8flow: {link(first)}, {link(second)}"))


STAGE_ORDER = ["norm", "route", "plan", "cast", "dispatch", "fc1", "swiglu", "fc2", "combine", "shared expert",
               "transpose", "fc2 wgrad", "fc2 dgrad", "fc1 wgrad", "fc1 dgrad", "moe layer"]


def layer_stages():
    """Forward and backward of each stage."""
    arms, rows = recipes_of(STAGES), []
    for stage in STAGE_ORDER:
        pairs = [[arm.rows("moe layer", way, stage) for way in ("forward", "backward")] for arm in arms]
        cells = [" + ".join(f"{ms:.2f}" if ms else "-" for ms in pair) if any(pair) else "" for pair in pairs]
        rows.append(["between stages" if stage == "moe layer" else stage, *cells])
    rows.append(["sum of medians", *(f"{arm.rows('moe layer'):.2f}" for arm in arms)])
    rows.append(["end to end, without the stage timer", *(f"{arm.layer:.2f}" for arm in arms)])
    return table(["ms, forward + backward", *RECIPES], rows) + source(origin(STAGES))


def whole_model():
    """The step of the 107 M model by stage, per layer where it repeats."""
    name = "profile_100m_1gpu.json"
    arms = recipes_of(name, ["fp8_flow", "fp8_flow + shared"])
    rows = [[f"attention: {stage}", *(" + ".join(f"{arm.rows('attention', way, stage):.3f}" for way in ("forward", "backward"))
                                      for arm in arms)] for stage in ("norm", "qkv", "core attention", "proj")]
    rows.append(["MoE layer, end to end", *(f"{arm.layer:.3f}" for arm in arms)])
    rows += [[label, *(f"{arm.rows(part, direction):.2f}" for arm in arms)] for label, part, direction in (
        ("embedding, backward", "embedding", "backward"), ("head", "head", "forward"), ("optimizer", "optimizer", "update"))]
    rows.append(["step, 8 layers", *(arm.ms("step seconds") for arm in arms)])
    return table(["ms, forward + backward", "serial", "shared expert in parallel"], rows) + source(origin(name))


# ---- tables with a row per arm: pattern of the file names, {label: what the pattern takes}, columns
LABEL, LAYER, MHZ = (lambda arm: arm.label), (lambda arm: f"{arm.layer:.2f}"), (lambda arm: f"{arm.mhz:.0f}")
STEP, WIRE = (lambda arm: arm.ms("step seconds")), (lambda arm: arm.ms("wire seconds"))
BY_ARM = {
    # what runs in parallel: passes, cycles, exchange calls, step
    "schedules": ("exposed_{}.json", {
        "DeepSeek-V3 layer": "deepseek_v3_4gpu", "the same, BF16 gradients": "deepseek_v3_4gpu_bf16_gradients",
        "the same, FP32 gradients, 8 micro-batches": "deepseek_v3_4gpu_micro_batches", "107 M model": "100m_4gpu"}, {
        "4 x H200": LABEL, "schedule": lambda arm: arm.schedule("serial"),
        "passes, ms per layer": lambda arm: f"{arm.passes():.2f}",
        "of serial": lambda arm: f"{arm.passes() / Arm('', {}, arm.profile['recipes'][0]).passes():.3f}", "MHz": MHZ,
        "M cycles": lambda arm: f"{arm.passes() * arm.mhz / 1e3:.2f}", "exchange, ms": WIRE,
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
        "configs/quickstart.yaml | graph + shared": "quickstart_graph_shared",
        "configs/h200_100m.yaml, 4096 tokens | graph": "100m_graph_serial",
        "configs/h200_100m.yaml, 4096 tokens | graph + shared": "100m_graph_shared"}, {
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
    files = {label: pattern.format(part) for label, part in files.items()}
    rows = [[column(arm) for column in columns.values()] for label, file in files.items() for arm in arms_of(label, file)]
    return table(list(columns), rows, 2 if "schedule" in columns else 1) + source(origin(*files.values()))


# ---- kernels
def rows_of(name, op, words):
    """Rows of a bench.json of this operation that have all of these words in their shape."""
    return [row for row in load(name) if row["op"] == op and set(words.split()) <= set(row["shape"].split())
            and "peer=alltoall" not in row["shape"]]


def the_row(name, op, words):
    found = rows_of(name, op, words)
    assert len(found) == 1, (name, op, words, len(found))
    return found[0]


GEMMS = [  # label, operation, words of the shape
    ("forward, N 4096, K 7168", "grouped_gemm", "G=32 N=4096 K=7168"),
    ("input gradient of fc1, N 7168, K 4096", "grouped_gemm", "G=32 N=7168 K=4096"),
    ("forward, N 7168, K 2048", "grouped_gemm", "G=32 N=7168 K=2048"),
    ("wgrad 4096 x 7168, overwrite", "grouped_gemm_wgrad", "G=32 N=4096 K=7168 mode=overwrite"),
    ("wgrad 4096 x 7168, accumulate", "grouped_gemm_wgrad", "G=32 N=4096 K=7168 mode=accumulate"),
    ("wgrad 4096 x 7168, 8 groups, overwrite", "grouped_gemm_wgrad", "G=8 N=4096 K=7168 mode=overwrite"),
    ("wgrad 4096 x 7168, 8 groups, accumulate", "grouped_gemm_wgrad", "G=8 N=4096 K=7168 mode=accumulate"),
]


def gemm():
    """Rates of this project's grouped GEMM and of cuBLASLt."""
    own, other = "bench_grouped_gemm_h200.json", "bench_gemm_h200.json"

    def cell(op, words, kind, name, backend):
        found = rows_of(name, op, f"M=32768 rows=balanced {words} type={kind} {backend}")
        flops = 2.0 * 32768 * math.prod(int(word[2:]) for word in words.split() if word[:2] in ("N=", "K="))
        return f"{flops / found[0]['us'] / 1e6:.0f} / {flops / found[0]['us_sustained'] / 1e6:.0f}" if found else ""
    rows = [[label, *(cell(op, words, kind, *of) for kind in ("fp8", "bf16")
                      for of in ((own, ""), (other, "gemm_backend=cublaslt")))] for label, op, words in GEMMS]
    return (table(["32,768 rows in 32 groups, TFLOP/s burst / sustained", "FP8", "FP8, cuBLASLt", "BF16", "BF16, cuBLASLt"],
                  rows) + source(origin(own), "cuBLASLt, on another H200: " + origin(other)))


def deepgemm():
    name = "bench_deepgemm_h200.json"
    data = load(name)
    rows = [[row["shape"], *itertools.chain(*((f"{us:.0f} us", f"{ratio:.3f}")
                                              for us, ratio in zip(row["us"], row["deepgemm / ours"])))]
            for row in data["rows grouped, per host"]]
    wgrad = [[row["shape"], "; ".join(map(str, row["us"])) + " us",
              "; ".join(f"{ratio:.3f}" for ratio in row["deepgemm / ours"])]
             for row in data["wgrad accumulated into FP32, per host"]]
    return (table(["rows grouped", "ours, host 1", "DeepGEMM / ours", "ours, host 2", "DeepGEMM / ours"], rows) + "\n\n" +
            table(["FP8 wgrad, accumulated into FP32", "ours, three hosts", "DeepGEMM / ours"], wgrad) +
            source(f"{origin(name)}, DeepGEMM {data['deepgemm commit']}; a stand-alone program that the file "
                   "describes, not in the repository", commands=False))


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
        row = the_row(f"bench_{suite}_h200.json", op, words)
        rows.append([label, f"`{op}`", f"{row['us']:.0f}", f"{row['ceiling_share'] * 100:.0f} %", suite])
    return (table(["operation", "bench row", "us", "share of its ceiling", "suite"], rows, 2) +
            source(origin(UPSTREAM), origin(LAYER_SUITE)))


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
            + source(origin(UPSTREAM), link("baselines_h200.json")))


EXCHANGES = {gpus: f"bench_exchange_h200_x{gpus}.json" for gpus in (8, 4, 2)}


def exchange():
    rows, others = [], baseline_us()
    for gpus, tokens in itertools.product(EXCHANGES, (4096, 8192)):
        for label, op, words in (("dispatch FP8", "dispatch", "wire=fp8"), ("dispatch BF16", "dispatch", "wire=bf16"),
                                 ("combine BF16", "combine", "part=whole order=rank dprob=no")):
            row = the_row(EXCHANGES[gpus], op, f"T={tokens} {words} sms=0 dispatcher=flex")
            other = others.get((op, row["shape"].replace(" peer=none", ""), gpus))
            rows.append([label, tokens, gpus, f"{row['us']:.0f}", f"{row['wire_bytes'] / row['us'] / 1e3:.0f}",
                         f"{row['ceiling_share'] * 100:.0f} %", f"{other:.0f}" if other else ""])
    return (table(["", "tokens", "GPUs", "us", "wire, GB/s", "share of ceiling", "DeepEP V2, us"], rows) +
            source(origin(*EXCHANGES.values())))


def exchange_sms():
    sms = [8, 16, 24, 32, 64, 132]
    rows = [[f"{op}, {gpus} GPUs, us",
             *(f"{the_row(name, op, f'T=4096 {words} sms={n} dispatcher=flex')['us']:.0f}" for n in sms)]
            for gpus, name in EXCHANGES.items()
            for op, words in (("dispatch", "wire=fp8"), ("combine", "part=whole dprob=no"))]
    return table(["SMs (4096 tokens)", *sms], rows) + source(origin(*EXCHANGES.values()))


def slow_operations():
    """Operations of four whole models below 70 % of their ceiling."""
    rows = [[row["op"], row["shape"], f"{row['us']:.1f}", f"{row['ceiling_us']:.1f}", f"{row['ceiling_share'] * 100:.0f} %"]
            for row in load("bench_model_h200.json") if row.get("ceiling_us") and row["ceiling_share"] < 0.7]
    return (table(["operation", "shape", "us", "ceiling, us", "share"], rows, 2) +
            source(origin("bench_model_h200.json")))


# ---- losses, copies, and comparisons with transformers
RUNS = [  # model, file
    ("quickstart, 2 CPU ranks", "quickstart_recipes.json"),
    ("quickstart, one H200", "quickstart_recipes_h200.json"),
    ("107 M, 1000 iterations, 4 H200s", "validate_h200_100m.json"),
]


def percent(share, digits=3):
    return "" if share is None else f"{share * 100:.{digits}f} %"


def loss():
    """Recipes against bf16 over a training: final held-out loss, errors of the smoothed loss, verdict."""
    rows = [[label, arm["arm"], f"{arm['held out']:.4f}", percent(arm.get("max relative error")),
             percent(arm.get("mean relative error")), arm["casts per step"], f"{arm['wire bytes per step'] / 2**20:.2f}",
             f"{arm['saved bytes'] / 2**20:.1f}", arm["verdict"]] for label, name in RUNS for arm in load(name)["arms"]]
    return (table(["run", "recipe", "held-out loss", "largest error", "mean error", "casts per step", "wire, MiB per step",
                   "saved, MiB", "verdict"], rows, 2) + source(origin(*(name for _, name in RUNS))))


def family_errors():
    """Norm-wise errors of one layer of every family: output and gradient of the experts."""
    name, errors = "compare_torch_families.json", {}
    data = load(name)
    for arm in data["arms"]:
        cells = errors.setdefault(arm["family"], [arm["family"]])
        if arm["arm"] == "torch bf16":
            cells.append(f"{arm['routed alike']}/{data['tokens']}")
        cells += [f"{arm['output']:.1e}", f"{arm['d experts']:.1e}"]
    return (table(["layer", "torch bf16: tokens routed alike", "output", "d experts", "bf16: output", "d experts",
                   "fp8_flow: output", "d experts"], errors.values()) +
            source(f"{origin(name)}; `torch bf16` is transformers' own block in BF16", commands=False))


def training_with_transformers():
    name, rows = "compare_training_cpu.json", []
    data = load(name)
    for comparison in data["comparisons"]:
        exact = comparison["arms"][0]["losses"][-1]  # PyTorch in FP32
        for arm in comparison["arms"][1:]:
            loss, gradient = arm["loss"], arm["gradient"]
            kind = max(gradient["kinds"], key=gradient["kinds"].get)
            rows.append([comparison["family"], comparison["balancing loss"], arm["arm"], f"{exact:.4f}",
                         f"{arm['losses'][-1]:.4f}", f"{loss['mean relative']:.1e}", f"{loss['max relative']:.1e}",
                         f"{loss['last tenth relative']:+.1e}", f"{gradient['all']:.1e}",
                         f"{kind} {gradient['kinds'][kind]:.1e}"])
    return (table(["model", "balancing loss", "arm", "last loss, torch fp32", "last loss", "mean error", "max error",
                   "last tenth", "d all", "worst kind of d"], rows, 3) +
            f"\n\n{data['steps']} steps of {data['tokens per step']} tokens, torch {data['torch']}, "
            f"transformers {data['transformers']}." + source(origin(name), commands=False))


def transposed():
    """Values that transposed copies lose, over the iterations of a training."""
    name, lines = "transposed_quickstart_cpu.json", []
    iterations = load(name)["iterations"]
    for tensor in ["dye^T", "dh^T", "a^T", "xe^T"]:
        rows = {step["iteration"]: [row for row in step["transposed"] if row["tensor"] == tensor] for step in iterations}
        every = [(row, iteration) for iteration, found in rows.items() for row in found]

        def flushed(found):
            return percent(sum(row["flushed"] for row in found) / sum(row["nonzero"] for row in found), 5)
        most, when = max(every, key=lambda pair: pair[0]["flushed norm share"])
        lines.append(["configs/quickstart.yaml, 2 CPU ranks", tensor,
                      f"{sum(row['nonzero'] for row, _ in every) / 1e6:.1f} M", flushed([row for row, _ in every]),
                      *(f"{step}: {flushed(rows[step])}" for step in (min(rows), max(rows))),
                      f"{most['flushed norm share']:.1e}", f"{most['weight'].removesuffix('.weight')}, {when}",
                      f"{max(row['nmse'] for row, _ in every):.1e}"])
    return table(["run", "copy", "values not 0", "flushed", "at iteration", "and at", "most of a norm^2", "of", "most NMSE"],
                 lines, 2) + source(origin(name))


# ---- docs/results/README.md: the command that measures each file of the program again
OURS = re.compile(r"(mpirun -n \d+ )?fp8flow ")
PLACES = re.compile(r" --(overwrite|(backend|out|peers) \S+)")  # do not change what is measured


def measured_on(item):
    """GPUs of a result: "4 x H200", or "2 CPU ranks"."""
    machine = item.get("machine") or {}
    gpu = item.get("gpu") or machine.get("gpu")
    count = item.get("gpus") or item.get("ranks") or machine.get("ranks")
    if not gpu:
        return f"{count} CPU ranks"
    kind = re.search(r"H\d+", gpu)[0]
    return f"{count} x {kind}" if count > 1 else kind


def commands():
    """One row per result of `fp8flow`; `defaults then`: settings that were defaults when the file was made."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        data = load(path.name)
        first = data[0] if isinstance(data, list) else data
        if OURS.match(first.get("command", "")):
            command = f"{PLACES.sub('', first['command'])} {first.get('defaults then', '')}"
            rows.append([f"[{path.name}]({path.name})", measured_on(first), f"`{shlex.join(shlex.split(command))}`"])
    return table(["file", "on", "command"], rows, 3)


TABLES = {**{make.__name__: make for make in (
    headline, layers, baselines, layer_stages, whole_model, gemm, deepgemm, memory_bound, upstream_counts, exchange,
    exchange_sms, slow_operations, loss, family_errors, training_with_transformers, transposed, commands)},
    **{name: functools.partial(by_arm, name) for name in BY_ARM}}


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


def picture():
    arms = recipes_of(STAGES)
    profile = arms[0].profile
    width, left, right, bar, gap, top = 960, 150, 110, 46, 22, 128
    scale = (width - left - right) / max(arm.rows("moe layer") for arm in arms)
    height = top + len(arms) * (bar + gap) + 44
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           'role="img" font-family="DejaVu Sans, Arial, sans-serif">',
           "<title>Time of the DeepSeek-V3 MoE layer on four H200s by recipe and stage</title>",
           "<style>.t{fill:#1f2937}.s{fill:#4b5563}"
           "@media (prefers-color-scheme: dark){.t{fill:#e5e7eb}.s{fill:#b6bec9}}</style>"]

    def text(x, y, words, size, look):
        out.append(f'<text x="{x}" y="{y}" {look} font-size="{size}">{words}</text>')

    def box(x, y, width, height, stages, title=""):
        out.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{COLORS[stages[0]]}">{title}</rect>')

    text(24, 34, "DeepSeek-V3 MoE layer, forward + backward, ms", 18, 'class="t" font-weight="bold"')
    text(24, 56, f'4 x {profile["machine"]["device"]}, 256 experts, top-8, 4096 tokens per GPU, balanced routing; medians '
         f'of {profile["steps"]} steps, commit {profile["commit"]}', 12.5, 'class="s"')
    x, y = 24, 82
    for label, stages in GROUPS.items():
        step = 24 + 7.4 * len(label) + 12
        if x + step > width - 16:
            x, y = 24, y + 20
        box(f"{x:.0f}", y - 10, 12, 12, stages)
        text(f"{x + 17:.0f}", y, label, 12, 'class="s"')
        x += step
    for i, arm in enumerate(arms):
        x, y = float(left), top + i * (bar + gap)
        text(left - 12, f"{y + bar / 2 + 5:.0f}", arm.data["name"], 14, 'class="t" text-anchor="end"')
        for label, stages in GROUPS.items():
            ms = sum(arm.rows("moe layer", None, stage) for stage in stages)
            if ms > 0:
                box(f"{x:.1f}", y, f"{ms * scale:.1f}", bar, stages, f"<title>{label}: {ms:.2f} ms</title>")
            if ms * scale > 34:
                text(f"{x + ms * scale / 2:.1f}", f"{y + bar / 2 + 4:.0f}", f"{ms:.2f}", 12,
                     'fill="#ffffff" text-anchor="middle"')
            x += ms * scale
        text(f"{x + 10:.1f}", f"{y + bar / 2 + 6:.0f}", f"{arm.layer:.2f} ms", 17, 'class="t" font-weight="bold"')
    text(24, height - 18, "Bars: medians of the stages under the stage timer. Bold: end to end, measured in a second pass "
         "without it.", 12, 'class="s"')
    return "\n".join([*out, "</svg>"]) + "\n"


# ---- from the program: docs/configuration.md, docs/scaling.md
def printed(program, *arguments):
    run = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if run.returncode != 0:
        sys.exit(f"{shlex.join([program, *arguments])}: {run.stderr.strip()}")
    return run.stdout


def keys(program):
    """Of `fp8flow --help-config`: sections begin a line, keys follow two blanks, what is said of a key six."""
    out, key = [], []

    def finish():
        if key:
            name, kind, default = re.match(r"(\w+): (.*?)(?:; default (.*))?$", key[0]).groups()
            recipes = [". Recipes: " + line.removeprefix("recipes: ") for line in key[1:] if line.startswith("recipes: ")]
            meaning = " ".join(line for line in key[1:] if not line.startswith("recipes: ")) + "".join(recipes)
            cells = [f"`{name}`", kind.replace("|", "\\|"), "" if default is None else f"`{default}`", meaning.replace("|", "\\|")]
            out.append(f"| {' | '.join(cells)} |")
            key.clear()

    for line in printed(program, "--help-config").splitlines()[1:]:
        if re.match(r"[a-z]+:$", line):
            finish()
            out.append(f"\n## {line[:-1]}\n\n| key | values | default | meaning |\n|---|---|---|---|")
        elif line.startswith("      "):
            key.append(line.strip())
        elif line.startswith("  "):
            finish()
            key.append(line.strip())
    finish()
    return "\n".join(out) + "\n"


def plan_table(program, runs):
    """One table of several plans; a run inside a host has no column of the rows between hosts."""
    header, rows = None, []
    for run in runs.strip().splitlines():
        label, arguments = run.split(":", 1)
        lines = printed(program, "plan", *shlex.split(arguments), "--markdown").splitlines()
        names, _, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        header = header or ["model" if label else "", *names]
        for row in found:
            cells = dict(zip(names, row))
            rows.append([label.strip(), *(cells.get(name, "-") for name in header[1:])])
    rule = ["---"] + ["---:" if name not in ("recipe", "fits", "basis") else "---" for name in header[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows]) + "\n"


# ---- pages
MARK = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end \1 -->", re.S)
KEYS = re.compile(r"(<!-- keys -->\n).*", re.S)
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
    configuration, scaling = (ROOT / "docs" / name for name in ("configuration.md", "scaling.md"))
    return {configuration: KEYS.sub(lambda mark: mark[1] + keys(program), configuration.read_text()),
            scaling: PLAN.sub(lambda mark: mark[1] + "\n" + plan_table(program, mark[2]) + "\n" + mark[4],
                              scaling.read_text())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
