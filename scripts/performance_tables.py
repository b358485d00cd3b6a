# SPDX-License-Identifier: MIT
"""The tables of docs/performance.md and the pages next to it, and the picture of a layer, from the files of docs/results. Imported by
make_performance_tables.py. Over 600 lines: a list of tables that share the helpers and columns at its top; no table depends on another."""
import collections
import functools
import itertools
import json
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
RECIPES = ["bf16", "fp8_blockwise", "fp8_flow"]


def text_of(name):
    return (RESULTS / name).read_text()


def load(name):
    return json.loads(text_of(name))


def commits_in(text):
    return re.findall(r"\bcommit ([0-9a-f]{7})", text)


def sizes_of(shape):
    """{"M": 32768, ...} of "M=32768 ..."."""
    return {key: int(value) for key, value in re.findall(r"([A-Z])=(\d+)", shape)}


def table(header, rows, align_from=1):
    """A Markdown table; columns from align_from on are numbers."""
    rule = ["---" if i < align_from else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in [header, rule, *rows])


def source(*parts, commands=True):
    """The line under a table; commands: whether docs/results/README.md has the commands of the files."""
    return f"\n\nFrom {'; '.join(parts)}." + (" [Commands](results/README.md#commands)." if commands else "")


def link(name):
    return f"[{name}](results/{name})"  # `filled` makes it relative to the page


def origin(*names):
    """Links of files whose rows or object carry one commit and date; neighbours with the same ones share a bracket."""
    def made(name):
        data = load(name)
        rows = data if isinstance(data, list) else [data]
        numbers = collections.Counter(row["commit"] for row in rows).most_common()
        commit = numbers[0][0] + "".join(f", {count} of {len(rows)} rows from {other}" for other, count in numbers[1:])
        return f"({commit}, {rows[0]['date'][:10]})"
    return "; ".join(", ".join(map(link, group)) + " " + at for at, group in itertools.groupby(names, made))


def recipe_of(profile, name):
    return next(r for r in profile["recipes"] if r["name"] == name)


def layer_ms(recipe):
    return recipe["layer seconds"]["median"] * 1e3


def stage_ms(recipe):
    """(stage, direction) -> median ms, of the MoE layer alone."""
    result = {}
    for row in recipe["rows"]:
        if row["part"] == "moe layer":
            key = (row["stage"], row["direction"])
            result[key] = result.get(key, 0.0) + row["seconds"]["median"] * 1e3
    return result


def schedule_of(recipe, plain="serial"):
    """What an arm of fp8_flow has besides: "graph" of "fp8_flow + graph"; `plain` where it has nothing."""
    return recipe["name"].replace("fp8_flow + ", "").replace("fp8_flow", plain)


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
                 rows) + source(origin(*(name for _, name in LAYERS)))


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
        source(origin(LAYERS[0][1], LAYERS[2][1], LAYERS[3][1], "validate_h200_100m.json"))


def baselines():
    """Whole layers of other implementations on one H200: the fastest of each."""
    data = load("peers_layers_h200.json")
    rows = []
    for p in data["peers"]:
        cells = [f"{p[layer]['burst ms']:.2f} / {p[layer]['sustained ms']:.2f}" if p[layer] else "" for layer in ("deepseek_v3", "qwen3")]
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
    return table(list(columns), rows, 2 if name in ("schedules", "graphs") else 1) + source(origin(*(file for _, file in files)))


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


# ---- kernels
def parse_products():
    """Rows of the first sitting of bench_products_h200.txt: {(op, shape): (us, sustained us)}."""
    head, second = text_of("bench_products_h200.txt").split("\nSecond, ", 1)

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


def rates(us, sustained, flops):
    return f"{flops / us / 1e6:.0f} / {flops / sustained / 1e6:.0f}"


def cublaslt(op, shape, kind):
    """The same shape in bench_gemm_h200.json on cuBLASLt."""
    wanted = {"rows=balanced", f"type={kind}", "gemm_backend=cublaslt", *(f"{key}={value}" for key, value in sizes_of(shape).items())}
    if op == "grouped_gemm_wgrad":
        wanted.add("mode=accumulate" if "mode=accumulate" in shape else "mode=overwrite")
    for row in load("bench_gemm_h200.json"):
        if row["op"] == op and wanted <= set(row["shape"].split()) and row.get("us_sustained"):
            return rates(row["us"], row["us_sustained"], row["flops"])
    return ""


def gemm():
    first, second = parse_products()
    rows = []
    for label, op, shape in GEMMS:
        size = sizes_of(shape)
        flops = 2.0 * size["M"] * size["N"] * size["K"]
        bf16_shape = shape.replace(" micro_batches=1", "").replace(" mode=", " type=bf16 mode=")
        if "type=bf16" not in bf16_shape:
            bf16_shape += " type=bf16"
        bf16 = first.get((op, bf16_shape)) or second.get((op, bf16_shape))
        rows.append([label, rates(*first[op, shape], flops), cublaslt(op, shape, "fp8"), rates(*bf16, flops) if bf16 else "",
                     cublaslt(op, shape, "bf16")])
    commits = commits_in(text_of("bench_products_h200.txt"))
    return (table(["32,768 rows in 32 groups, TFLOP/s burst / sustained", "FP8", "FP8, cuBLASLt", "BF16", "BF16, cuBLASLt"], rows) +
            source(f"{link('bench_products_h200.txt')}, commits {commits[0]} (FP8, BF16 forward) and {commits[1]} (BF16 wgrad); its `$` lines "
                   "are the commands", "cuBLASLt, on another H200: " + origin("bench_gemm_h200.json")))


def gemm_errors():
    data = load("bench_gemm_h200.json")

    def span(op, kind):
        errors = [r["nmse"] for r in data if r["op"] == op and f"type={kind}" in r["shape"] and r.get("nmse")]
        return f"{min(errors):.1e} to {max(errors):.1e}"
    forward = [r["nmse"] for r in data if r["op"] == "grouped_gemm" and r.get("nmse")]
    return (table(["GEMM", "NMSE against a double-precision product of the same operands"],
                  [["BF16 results (forward, data gradient)", f"{min(forward):.1e} to {max(forward):.1e}"],
                   ["FP8 weight gradients, FP32 results", span("grouped_gemm_wgrad", "fp8")],
                   ["BF16 weight gradients, FP32 results", span("grouped_gemm_wgrad", "bf16")]]) +
            source(origin("bench_gemm_h200.json")))


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
    commit = commits_in(text_of("bench_products_h200.txt"))[0]
    return (table(["shape", "fused, h not written", "grouped_gemm", "swiglu_quantize", "both"], rows) +
            source(f"{link('bench_products_h200.txt')}, commit {commit}; its `$` lines are the commands", commands=False))


def deepgemm():
    text = text_of("bench_deepgemm_h200.txt")
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
    return (table(["rows grouped", "ours, host 1", "DeepGEMM / ours", "ours, host 2", "DeepGEMM / ours"], rows) + "\n\n" +
            table(["FP8 wgrad, accumulated into FP32", "ours, three hosts", "DeepGEMM / ours"], wgrad) +
            source(f"{link('bench_deepgemm_h200.txt')}, part I, commit {commit}, DeepGEMM 54e2261; a stand-alone program that the file "
                   "describes, not in the repository", commands=False))


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
    found = [r for r in rows if r["op"] == op and set(words.split()) <= set(r["shape"].split()) and "peer=alltoall" not in r["shape"]]
    assert len(found) == 1, (op, words, len(found))
    return found[0]


def memory_bound():
    files = {"upstream": load("bench_upstream_h200.json"), "layer": load("bench_layer_h200.json")}
    rows = []
    for label, suite, op, words in MEMORY:
        row = the_row(files[suite], op, words)
        rows.append([label, f"`{op}`", f"{row['us']:.0f}", f"{row['ceiling_share'] * 100:.0f} %", suite])
    return (table(["operation", "bench row", "us", "share of its ceiling", "suite"], rows, 2) +
            source(origin("bench_upstream_h200.json"), origin("bench_layer_h200.json")))


def baseline_us():
    """(op, shape, GPUs) -> microseconds of the fastest other implementation measured on H200s."""
    return {(b["op"], b["shape"], b["gpus"]): b["us"] for b in load("baselines_h200.json")["baselines"]}


def upstream_counts():
    data, others = load("bench_upstream_h200.json"), baseline_us()
    ratios = [others[key] / r["us"] for r in data if (key := (r["op"], r["shape"], r["gpus"])) in others]
    shares = sorted(r["ceiling_share"] for r in data if r.get("ceiling_share") and r["bytes"] >= 64e6)
    return (f"{len(data)} rows. Of the {len(shares)} that move at least 64 MB, half reach {shares[len(shares) // 2] * 100:.0f} % of their ceiling or more.\n"
            f"{len(ratios)} rows have a baseline measured on an H200; {sum(r >= 1 for r in ratios)} of them take no longer than the baseline, "
            f"the slowest takes {1 / min(ratios):.3f} times its time."
            + source(origin("bench_upstream_h200.json"), link("baselines_h200.json")))


def exchange():
    rows, others = [], baseline_us()
    for gpus in (8, 4, 2):
        data = load(f"bench_exchange_h200_x{gpus}.json")
        for tokens in (4096, 8192):
            for op, words in (("dispatch", "wire=fp8"), ("dispatch", "wire=bf16"), ("combine", "part=whole order=rank dprob=no")):
                row = the_row(data, op, f"T={tokens} {words} sms=0 dispatcher=flex")
                rows.append([op + (" FP8" if "fp8" in words else " BF16"), tokens, gpus, f"{row['us']:.0f}",
                             f"{row['wire_bytes'] / row['us'] / 1e3:.0f}", f"{row['ceiling_share'] * 100:.0f} %",
                             f"{others[key]:.0f}" if (key := (op, row["shape"].replace(" peer=none", ""), gpus)) in others else ""])
    return (table(["", "tokens", "GPUs", "us", "wire, GB/s", "share of ceiling", "DeepEP V2, us"], rows) +
            source(origin(*(f"bench_exchange_h200_x{g}.json" for g in (8, 4, 2)))))


def exchange_sms():
    sms = [8, 16, 24, 32, 64, 132]
    rows = []
    for gpus in (8, 4, 2):
        data = load(f"bench_exchange_h200_x{gpus}.json")
        for op, words in (("dispatch", "wire=fp8"), ("combine", "part=whole dprob=no")):
            rows.append([f"{op}, {gpus} GPUs, us",
                         *(f"{the_row(data, op, f'T=4096 {words} sms={n} dispatcher=flex')['us']:.0f}" for n in sms)])
    return (table(["SMs (4096 tokens)", *sms], rows) + source(origin(*(f"bench_exchange_h200_x{g}.json" for g in (8, 4, 2)))))


def slow_operations():
    """Operations of four whole models below 70 % of their ceiling."""
    rows = [[r["op"], r["shape"], f"{r['us']:.1f}", f"{r['ceiling_us']:.1f}", f"{r['ceiling_share'] * 100:.0f} %"]
            for r in load("bench_model_h200.json") if r.get("ceiling_us") and r["ceiling_share"] < 0.7]
    return table(["operation", "shape", "us", "ceiling, us", "share"], rows, 2) + source(origin("bench_model_h200.json"))


# ---- losses, copies, and comparisons with transformers
def percent(value):
    return "" if value is None else f"{value * 100:.3f} %"


RUNS = [  # model, GPUs, file
    ("quickstart, 2 CPU ranks", "quickstart_recipes.json"),
    ("quickstart, one H200", "quickstart_recipes_h200.json"),
    ("107 M, 1000 iterations, 4 H200s", "validate_h200_100m.json"),
]


def loss():
    """Recipes against bf16 over a training: final held-out loss, errors of the smoothed loss, verdict."""
    rows = []
    for label, name in RUNS:
        data = load(name)
        rows += [[label, a["arm"], f"{a['held out']:.4f}", percent(a.get("max relative error")), percent(a.get("mean relative error")),
                  a["casts per step"], f"{a['wire bytes per step'] / 2**20:.2f}", f"{a['saved bytes'] / 2**20:.1f}", a["verdict"]] for a in data["arms"]]
    return (table(["run", "recipe", "held-out loss", "largest error", "mean error", "casts per step", "wire, MiB per step", "saved, MiB", "verdict"], rows, 2) +
            source(origin(*(name for _, name in RUNS))))


def family_errors():
    """Norm-wise errors of one layer of every family against transformers' blocks in float64: output and gradient of the experts."""
    text = text_of("compare_torch_families.txt")
    errors = {}
    for family, arm, alike, output, experts in re.findall(
            r"^(\S+) +(torch bf16|bf16|fp8_flow) +(\d+/\d+) +\S+ +(\S+) +\S+ +(\S+) +\S+$", text, re.M):
        errors.setdefault(family, {})[arm] = [alike, output, experts] if arm == "torch bf16" else [output, experts]
    rows = [[family] + [value for arm in ("torch bf16", "bf16", "fp8_flow") for value in arms[arm]] for family, arms in errors.items()]
    commit = commits_in(text)[0]
    return (table(["layer", "torch bf16: tokens routed alike", "output", "d experts", "bf16: output", "d experts", "fp8_flow: output", "d experts"], rows, 1) +
            source(f"{link('compare_torch_families.txt')}, commit {commit}; `torch bf16` is transformers' own block in BF16", commands=False))


def training_with_transformers():
    data = load("compare_training_cpu.json")
    rows = []
    for comparison in data["comparisons"]:
        exact = comparison["arms"][0]["losses"][-1]  # PyTorch in FP32
        for arm in comparison["arms"][1:]:
            loss, gradient = arm["loss"], arm["gradient"]
            kind = max(gradient["kinds"], key=gradient["kinds"].get)
            rows.append([comparison["family"], comparison["balancing loss"], arm["arm"], f"{exact:.4f}", f"{arm['losses'][-1]:.4f}",
                         f"{loss['mean relative']:.1e}", f"{loss['max relative']:.1e}", f"{loss['last tenth relative']:+.1e}",
                         f"{gradient['all']:.1e}", f"{kind} {gradient['kinds'][kind]:.1e}"])
    return (table(["model", "balancing loss", "arm", "last loss, torch fp32", "last loss", "mean error", "max error", "last tenth", "d all",
                   "worst kind of d"], rows, 3) +
            f"\n\n{data['steps']} steps of {data['tokens per step']} tokens, torch {data['torch']}, transformers {data['transformers']}." +
            source(origin("compare_training_cpu.json") + ", by `scripts/compare_training.py`", commands=False))


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
    return table(header, lines, 2) + source(origin(*(name for _, name in TRANSPOSED)))


# ---- docs/results/README.md: the command that measures each file of the program again
OURS = re.compile(r"(mpirun -n \d+ )?fp8flow ")
NO_VALUE, ONE_VALUE = {"--overwrite"}, {"--backend", "--out", "--peers"}  # do not change what is measured
# Settings that were defaults when a file was made and are not today.
FROM_FIRST_STEP = ["--set", "training.lr_warmup_style=from_first_step"]
DEFAULTS_THEN = {
    "exposed_deepseek_v3_4gpu_micro_batches.json": ["--set", "precision.moe_wgrad_pair_micro_batches=false"],
    "profile_100m_1gpu.json": ["--set", "moe.moe_expert_rank_capacity_factor=0"],
    **dict.fromkeys(["quickstart_recipes.json", "quickstart_recipes_h200.json", "transposed_quickstart_cpu.json", "validate_h200_100m.json",
                     "validate_state_dtypes_h100_x2.json"], FROM_FIRST_STEP),
}


def command_today(name, command):
    """A recorded command without what says only where it writes, with the defaults of its day."""
    words, kept = shlex.split(command) + DEFAULTS_THEN.get(name, []), []
    while words:
        word = words.pop(0)
        if word in ONE_VALUE:
            words.pop(0)
        elif word not in NO_VALUE:
            kept.append(word)
    return shlex.join(kept)


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
    """One row per result of `fp8flow`."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        data = load(path.name)
        first = data[0] if isinstance(data, list) else data
        if OURS.match(first.get("command", "")):
            rows.append([link(path.name).replace("](results/", "]("), measured_on(first), f"`{command_today(path.name, first['command'])}`"])
    return table(["file", "on", "command"], rows, 3)


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


TABLES = {**{f.__name__: f for f in (headline, layers, baselines, layer_stages, whole_model, gemm, gemm_errors, fused_fc1, deepgemm, memory_bound,
                                     upstream_counts, exchange, exchange_sms, slow_operations, loss, family_errors, training_with_transformers,
                                     transposed, commands)},
          **{name: functools.partial(by_arm, name) for name in BY_ARM}}
