# SPDX-License-Identifier: MIT
"""Tables of docs/performance/kernels.md."""
import re

from performance_tables.common import RESULTS, link, load, origin, source, table


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
        if row["op"] == op and all(w in words for w in wanted) and row.get("us_sustained"):
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
            source(f"{link('bench_products_h200.txt')}, commits {commits[0]} (FP8, BF16 forward) and {commits[1]} (BF16 wgrad); `$` lines are "
                   "the commands", origin("bench_gemm_h200.json") + " (cuBLASLt, on another H200)"))


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
        rows.append([label, f"`{op}`", f"{row['us']:.0f}", f"{row['ceiling_share'] * 100:.0f} %", suite, row["commit"]])
    return (table(["operation", "bench row", "us", "share of its ceiling", "suite", "commit"], rows, 2) +
            source(origin("bench_upstream_h200.json"), origin("bench_layer_h200.json")))


def baselines():
    """(op, shape, GPUs) -> microseconds of the fastest other implementation measured on H200s."""
    return {(b["op"], b["shape"], b["gpus"]): b["us"] for b in load("baselines_h200.json")["baselines"]}


def upstream_counts():
    data, others = load("bench_upstream_h200.json"), baselines()
    ratios = [others[key] / r["us"] for r in data if (key := (r["op"], r["shape"], r["gpus"])) in others]
    shares = sorted(r["ceiling_share"] for r in data if r.get("ceiling_share") and r["bytes"] >= 64e6)
    return (f"{len(data)} rows. Of the {len(shares)} that move at least 64 MB, half reach {shares[len(shares) // 2] * 100:.0f} % of their ceiling or more.\n"
            f"{len(ratios)} rows have a baseline measured on an H200; {sum(r >= 1 for r in ratios)} of them take no longer than the baseline, "
            f"the slowest takes {1 / min(ratios):.3f} times its time."
            + source(origin("bench_upstream_h200.json"), link("baselines_h200.json")))


def exchange():
    rows, others = [], baselines()
    for gpus in (8, 4, 2):
        data = load(f"bench_exchange_h200_x{gpus}.json")
        for tokens in (4096, 8192):
            for op, words in (("dispatch", "wire=fp8"), ("dispatch", "wire=bf16"), ("combine", "part=whole order=rank dprob=no")):
                row = the_row(data, op, f"T={tokens} {words} sms=0 dispatcher=flex")
                rows.append([op + (" FP8" if "fp8" in words else " BF16"), tokens, gpus, f"{row['us']:.0f}",
                             f"{row['wire_bytes'] / row['us'] / 1e3:.0f}", f"{row['ceiling_share'] * 100:.0f} %",
                             f"{others[key]:.0f}" if (key := (op, row["shape"].replace(" peer=none", ""), gpus)) in others else ""])
    return (table(["", "tokens", "GPUs", "us", "wire, GB/s", "share of ceiling", "DeepEP V2, us"], rows) +
            source(*(origin(f"bench_exchange_h200_x{g}.json") for g in (8, 4, 2))))


def exchange_sms():
    sms = [8, 16, 24, 32, 64, 132]
    rows = []
    for gpus in (8, 4, 2):
        data = load(f"bench_exchange_h200_x{gpus}.json")
        for op, words in (("dispatch", "wire=fp8"), ("combine", "part=whole dprob=no")):
            rows.append([f"{op}, {gpus} GPUs, us",
                         *(f"{the_row(data, op, f'T=4096 {words} sms={n} dispatcher=flex')['us']:.0f}" for n in sms)])
    return (table(["SMs (4096 tokens)", *sms], rows) + source(*(origin(f"bench_exchange_h200_x{g}.json") for g in (8, 4, 2))))


def slow_operations():
    """Operations of four whole models below 70 % of their ceiling."""
    rows = [[r["op"], r["shape"], f"{r['us']:.1f}", f"{r['ceiling_us']:.1f}", f"{r['ceiling_share'] * 100:.0f} %"]
            for r in load("bench_model_h200.json") if r.get("ceiling_us") and r["ceiling_share"] < 0.7]
    return table(["operation", "shape", "us", "ceiling, us", "share"], rows, 2) + source(origin("bench_model_h200.json"))


TABLES = {f.__name__: f for f in (gemm, gemm_errors, fused_fc1, deepgemm, memory_bound, upstream_counts, exchange, exchange_sms, slow_operations)}
