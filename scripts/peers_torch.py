#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""PyTorch's own kernels on this GPU, at the shapes of `fp8flow bench --suite upstream` that PyTorch has an operation for: F.rms_norm forward and
backward, torch.compile of SwiGLU x probability + 1x128 quantisation, grouped and dense GEMMs. Prints one JSON object per line; docs/results/baselines_h200.json has the fastest of these
and of other implementations at each shape.

Measured as the bench does: random data, buffers rotated beyond the cache, median of samples timed by events, calls queued after a pause
so that the host's launching is hidden. Needs torch with CUDA, and nothing of this project.
"""

import argparse
import json
import statistics

if __name__ == "__main__":  # --help needs no torch
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

import torch
import torch.nn.functional as F

ROTATED = 200 << 20  # bytes
SOURCE = f"same sitting, torch {torch.__version__}"
NORMS = [(29, 17389), (256, 65536), (1024, 32768), (2048, 16384), (4096, 1024), (4096, 12288), (8192, 2048), (8192, 4096), (8192, 8192), (16384, 4096)]
SWIGLUS = [(32768, 256, 2048), (24576, 160, 1536), (24576, 64, 1408), (28672, 64, 1024)]  # rows, groups, F
GEMMS = [(4096, 7168), (7168, 2048)]  # N, K of 32 groups of 1024 rows


def report(operation, shape, microseconds, peer):
    print(json.dumps({"operation": operation, "shape": shape, "us": round(microseconds, 2), "peer": peer, "source": SOURCE}), flush=True)


def median_us(call, sets, samples=15):
    """Median over samples; a sample is several calls if one is short."""
    for index in range(max(3, len(sets))):
        call(*sets[index % len(sets)])
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample(calls, start):
        torch.cuda._sleep(2_000_000 + 200_000 * calls)
        first.record()
        for index in range(calls):
            call(*sets[(start + index) % len(sets)])
        last.record()
        torch.cuda.synchronize()
        return 1e3 * first.elapsed_time(last) / calls

    calls = 5 if sample(1, 0) < 400 else 1
    return statistics.median(sample(calls, index * calls) for index in range(samples))


def sets_of(make):
    one = make()
    size = sum(tensor.numel() * tensor.element_size() for tensor in one)
    return [one] + [make() for _ in range(min(64, ROTATED // size))]


def norm(tokens, hidden, dtype, name):
    shape = f"T={tokens},H={hidden},dtype={name}"
    weight = torch.randn(hidden, device="cuda", dtype=dtype).requires_grad_()
    forward = sets_of(lambda: (torch.randn(tokens, hidden, device="cuda", dtype=dtype),))
    with torch.no_grad():
        report("rms_norm", shape, median_us(lambda x: F.rms_norm(x, (hidden,), weight, 1e-6), forward), "torch F.rms_norm")

    def make():
        x = torch.randn(tokens, hidden, device="cuda", dtype=dtype).requires_grad_()
        return x, F.rms_norm(x, (hidden,), weight, 1e-6), torch.randn(tokens, hidden, device="cuda", dtype=dtype)

    backward = lambda x, y, dy: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    report("rms_norm_backward", shape + ",residual=no", median_us(backward, sets_of(make)), "torch F.rms_norm")


@torch.compile(dynamic=False)
def swiglu_quantize(h, prob):
    gate, up = h.chunk(2, dim=1)
    act = (F.silu(gate.float()) * up.float() * prob[:, None]).view(h.shape[0], -1, 128)
    scale = torch.exp2(torch.ceil(torch.log2(act.abs().amax(dim=2).clamp(min=1e-12) / 448.0)))
    return (act / scale[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def swiglu(rows, groups, ffn):
    sets = sets_of(lambda: (torch.randn(rows, 2 * ffn, device="cuda", dtype=torch.bfloat16), torch.rand(rows, device="cuda")))
    report("swiglu_quantize", f"M={rows},G={groups},rows=ragged,F={ffn}", median_us(swiglu_quantize, sets), "torch.compile")


def gemms():
    codes = lambda *shape: (torch.randn(*shape, device="cuda") * 128).clamp(-448, 448).to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    dense = sets_of(lambda: (codes(8192, 8192), codes(8192, 8192)))
    call = lambda a, b: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    report("gemm", "M=8192,N=8192,K=8192,type=fp8_tensor", median_us(call, dense), "cuBLASLt _scaled_mm")
    ends = torch.arange(1, 33, device="cuda", dtype=torch.int32) * 1024
    for n, k in GEMMS:
        make = lambda: (torch.randn(32768, k, device="cuda", dtype=torch.bfloat16), torch.randn(32, n, k, device="cuda", dtype=torch.bfloat16))
        call = lambda a, b: torch._grouped_mm(a, b.transpose(1, 2), offs=ends)
        report("grouped_gemm", f"M=32768,G=32,N={n},K={k},type=bf16", median_us(call, sets_of(make)), "torch._grouped_mm")


def main():
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
        for tokens, hidden in NORMS:
            norm(tokens, hidden, dtype, name)
    norm(4096, 7168, torch.bfloat16, "bf16")
    for rows, groups, ffn in SWIGLUS:
        swiglu(rows, groups, ffn)
    gemms()


if __name__ == "__main__":
    main()
