// SPDX-License-Identifier: MIT
// Other implementations' times, for `bench`: one JSON object a line in the format of parse_peers (peers.h).
// Only figures of others belong here; what this program reaches is measured anew in every run.
#include "model/bench/peers.h"

namespace fp8flow::bench {

// clang-format off
const char* const kPeerFigures = R"peers(
# Measured on one H200: torch 2.11, medians of CUDA events, cache cold, random data. Not in the same session as any run of this program.
{"operation": "quantize_rows", "shape": "M=32768,G=0,H=7168", "us": 166.2, "peer": "sgl-kernel", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "quantize_rows", "shape": "M=32768,G=0,H=2048", "us": 50.4, "peer": "sgl-kernel", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "quantize_rows", "shape": "M=4096,G=0,H=7168", "us": 24.2, "peer": "sgl-kernel", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_quantize", "shape": "M=32768,F=2048", "us": 94.1, "peer": "vLLM (no prob)", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_quantize", "shape": "M=32768,F=2048", "us": 97.1, "peer": "FP8-Flow Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_backward_quantize", "shape": "M=32768,F=2048", "us": 190.7, "peer": "FP8-Flow Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_quantize", "shape": "M=65536,F=1536", "us": 139.2, "peer": "vLLM (no prob)", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_quantize", "shape": "M=65536,F=1536", "us": 149.4, "peer": "FP8-Flow Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_backward_quantize", "shape": "M=65536,F=1536", "us": 280.9, "peer": "FP8-Flow Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_quantize", "shape": "M=32768,F=4096", "us": 183.7, "peer": "vLLM (no prob)", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_quantize", "shape": "M=32768,F=4096", "us": 195.6, "peer": "FP8-Flow Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "swiglu_backward_quantize", "shape": "M=32768,F=4096", "us": 399.3, "peer": "FP8-Flow Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "quantize_columns", "shape": "M=32768,G=32,H=7168", "us": 364.9, "peer": "torchao 36027d8", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "quantize_columns", "shape": "M=32768,G=32,H=2048", "us": 110.9, "peer": "torchao 36027d8", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "quantize_columns", "shape": "M=32768,G=32,H=4096,H2=7168", "us": 716.3, "peer": "torchao 36027d8", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "quantize_weight", "shape": "E=32,N=4096,K=7168,dtype=bf16,layout=mx32,fprop=no,dgrad=yes,rounding=floor", "us": 1435.5, "peer": "torchao dim1 (2-D)", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "quantize_weight", "shape": "E=32,N=4096,K=7168,dtype=bf16,layout=mx32,fprop=no,dgrad=yes,rounding=rceil", "us": 1455.4, "peer": "torchao dim1 (2-D)", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "quantize_weight", "shape": "E=1,N=32768,K=7168,dtype=bf16,layout=mx32,fprop=no,dgrad=yes,rounding=floor", "us": 367.2, "peer": "torchao dim1 (2-D)", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "permute_pad", "shape": "T=4096,E=32,H=7168,K=8,rows=ragged,align=1,dtype=bf16", "us": 145.3, "peer": "TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "permute_pad", "shape": "T=4096,E=32,H=7168,K=8,rows=ragged,align=1,dtype=e4m3", "us": 79.3, "peer": "TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "permute_pad", "shape": "T=4096,E=32,H=7168,K=8,rows=ragged,align=128,dtype=bf16", "us": 295.8, "peer": "TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "permute_pad", "shape": "T=4096,E=32,H=7168,K=8,rows=ragged,align=128,dtype=e4m3", "us": 159.7, "peer": "TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "permute_pad", "shape": "T=4096,E=256,H=7168,K=8,rows=ragged,align=1,dtype=bf16", "us": 152.5, "peer": "TE Triton + probs", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=32,H=7168,K=8,rows=ragged,align=1", "us": 124.8, "peer": "TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=32,H=7168,K=8,rows=ragged,align=1,prob=yes", "us": 127.1, "peer": "TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=32,H=7168,K=8,rows=ragged,align=128", "us": 127.7, "peer": "TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=256,H=7168,K=8,rows=ragged,align=1", "us": 125.4, "peer": "TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "plan_dispatch", "shape": "T=4096,E=32,K=8,rows=ragged", "us": 17.2, "peer": "TE Triton row_id_map", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "plan_dispatch", "shape": "T=4096,E=256,K=8,rows=ragged", "us": 109.5, "peer": "TE Triton row_id_map", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "transpose_fp8", "shape": "M=32768,G=32,H=7168", "us": 517.0, "peer": "FP8-Flow Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "transpose_fp8", "shape": "M=32768,G=32,H=2048", "us": 150.0, "peer": "FP8-Flow Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm", "shape": "T=4096,H=7168", "us": 46.0, "peer": "torch F.rms_norm", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm", "shape": "T=4096,H=7168", "us": 64.3, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_quantize", "shape": "T=4096,H=7168,y=no,fp8=tensor,amax=yes", "us": 62.8, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_quantize", "shape": "T=4096,H=7168,y=no,fp8=tensor,transposed=tensor,amax=yes", "us": 474.7, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_backward", "shape": "T=4096,H=7168,residual=no", "us": 81.6, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_backward", "shape": "T=4096,H=7168,residual=no", "us": 117.5, "peer": "torch F.rms_norm", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm", "shape": "T=8192,H=4096", "us": 44.4, "peer": "torch F.rms_norm", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm", "shape": "T=8192,H=4096", "us": 88.6, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_quantize", "shape": "T=8192,H=4096,y=no,fp8=tensor,amax=yes", "us": 89.6, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_quantize", "shape": "T=8192,H=4096,y=no,fp8=tensor,transposed=tensor,amax=yes", "us": 575.1, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_backward", "shape": "T=8192,H=4096,residual=no", "us": 105.0, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_backward", "shape": "T=8192,H=4096,residual=no", "us": 111.9, "peer": "torch F.rms_norm", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm", "shape": "T=16384,H=4096", "us": 81.6, "peer": "torch F.rms_norm", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm", "shape": "T=16384,H=4096", "us": 171.9, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_quantize", "shape": "T=16384,H=4096,y=no,fp8=tensor,amax=yes", "us": 173.8, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_quantize", "shape": "T=16384,H=4096,y=no,fp8=tensor,transposed=tensor,amax=yes", "us": 1054.7, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_backward", "shape": "T=16384,H=4096,residual=no", "us": 198.7, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_backward", "shape": "T=16384,H=4096,residual=no", "us": 213.0, "peer": "torch F.rms_norm", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm", "shape": "T=8192,H=8192", "us": 104.0, "peer": "torch F.rms_norm", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm", "shape": "T=8192,H=8192", "us": 132.1, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_quantize", "shape": "T=8192,H=8192,y=no,fp8=tensor,amax=yes", "us": 124.9, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_quantize", "shape": "T=8192,H=8192,y=no,fp8=tensor,transposed=tensor,amax=yes", "us": 1043.3, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_backward", "shape": "T=8192,H=8192,residual=no", "us": 157.2, "peer": "ROCm TE Triton", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
{"operation": "rms_norm_backward", "shape": "T=8192,H=8192,residual=no", "us": 250.7, "peer": "torch F.rms_norm", "gpu": "NVIDIA H200", "source": "measured 2026-11-20"}
# Four H200s, permute included; DeepEP dd758ca, 16 or 64 SMs, whichever is faster
{"operation": "dispatch", "shape": "T=4096,E=256,H=7168,K=8", "us": 391.0, "peer": "DeepEP V2 expand", "gpu": "NVIDIA H200", "gpus": 4, "source": "measured 2026-11-20"}
{"operation": "dispatch", "shape": "T=8192,E=256,H=7168,K=8", "us": 766.0, "peer": "DeepEP V2 expand", "gpu": "NVIDIA H200", "gpus": 4, "source": "measured 2026-11-20"}
{"operation": "combine", "shape": "T=4096,E=256,H=7168,K=8", "us": 617.0, "peer": "DeepEP V2", "gpu": "NVIDIA H200", "gpus": 4, "source": "measured 2026-11-20"}
{"operation": "combine", "shape": "T=8192,E=256,H=7168,K=8", "us": 1205.0, "peer": "DeepEP V2", "gpu": "NVIDIA H200", "gpus": 4, "source": "measured 2026-11-20"}
# Published by the authors, on their machines: the shapes are the same, the GPUs are not
{"operation": "rms_norm", "shape": "T=8192,H=8192", "us": 51.5, "peer": "authors", "gpu": "MI300", "source": "ROCm/TransformerEngine#593"}
{"operation": "rms_norm_quantize", "shape": "T=8192,H=8192,y=no,fp8=tensor,amax=yes", "us": 54.1, "peer": "authors", "gpu": "MI300", "source": "ROCm/TransformerEngine#593"}
{"operation": "rms_norm_quantize", "shape": "T=8192,H=8192,y=no,fp8=tensor,transposed=tensor,amax=yes", "us": 75.5, "peer": "authors", "gpu": "MI300", "source": "ROCm/TransformerEngine#593"}
{"operation": "rms_norm_backward", "shape": "T=8192,H=8192,residual=no", "us": 109.0, "peer": "authors", "gpu": "MI300", "source": "ROCm/TransformerEngine#593"}
{"operation": "permute_pad", "shape": "T=4096,E=64,H=1280,K=7,rows=ragged,dtype=bf16", "us": 595.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=64,H=1280,K=7,rows=ragged,dtype=bf16,fused=no", "us": 451.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=64,H=1280,K=7,rows=ragged,dtype=e4m3", "us": 579.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=64,H=1280,K=7,rows=ragged,dtype=e4m3,fused=no", "us": 596.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=64,H=1280,K=7,rows=ragged", "us": 180.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=64,H=1280,K=7,rows=ragged,fused=no", "us": 764.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=64,H=2048,K=6,rows=ragged,dtype=bf16", "us": 560.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=64,H=2048,K=6,rows=ragged,dtype=bf16,fused=no", "us": 445.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=64,H=2048,K=6,rows=ragged,dtype=e4m3", "us": 563.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=64,H=2048,K=6,rows=ragged,dtype=e4m3,fused=no", "us": 593.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=64,H=2048,K=6,rows=ragged", "us": 177.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=64,H=2048,K=6,rows=ragged,fused=no", "us": 781.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=160,H=5120,K=6,rows=ragged,dtype=bf16", "us": 906.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=160,H=5120,K=6,rows=ragged,dtype=bf16,fused=no", "us": 976.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=160,H=5120,K=6,rows=ragged,dtype=e4m3", "us": 848.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=160,H=5120,K=6,rows=ragged,dtype=e4m3,fused=no", "us": 1106.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=160,H=5120,K=6,rows=ragged", "us": 265.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=160,H=5120,K=6,rows=ragged,fused=no", "us": 1749.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=256,H=7168,K=8,rows=ragged,dtype=bf16", "us": 1266.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=256,H=7168,K=8,rows=ragged,dtype=bf16,fused=no", "us": 1594.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=256,H=7168,K=8,rows=ragged,dtype=e4m3", "us": 1127.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=256,H=7168,K=8,rows=ragged,dtype=e4m3,fused=no", "us": 1567.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=256,H=7168,K=8,rows=ragged", "us": 456.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=256,H=7168,K=8,rows=ragged,fused=no", "us": 3148.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=384,H=8192,K=8,rows=ragged,dtype=bf16", "us": 1618.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=384,H=8192,K=8,rows=ragged,dtype=bf16,fused=no", "us": 2164.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=384,H=8192,K=8,rows=ragged,dtype=e4m3", "us": 1389.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=384,H=8192,K=8,rows=ragged,dtype=e4m3,fused=no", "us": 2147.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=384,H=8192,K=8,rows=ragged", "us": 517.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=384,H=8192,K=8,rows=ragged,fused=no", "us": 3788.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=512,H=9216,K=8,rows=ragged,dtype=bf16", "us": 1741.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=512,H=9216,K=8,rows=ragged,dtype=bf16,fused=no", "us": 2415.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=512,H=9216,K=8,rows=ragged,dtype=e4m3", "us": 1587.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "permute_pad", "shape": "T=4096,E=512,H=9216,K=8,rows=ragged,dtype=e4m3,fused=no", "us": 2698.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=512,H=9216,K=8,rows=ragged", "us": 608.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "unpermute_unpad", "shape": "T=4096,E=512,H=9216,K=8,rows=ragged,fused=no", "us": 4447.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#1921"}
{"operation": "transpose_fp8", "shape": "M=28672,G=32,H=1280", "us": 152.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_requantize", "shape": "M=28672,G=32,H=1280,fused=no", "us": 351.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_fp8", "shape": "M=24576,G=32,H=2048", "us": 156.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_requantize", "shape": "M=24576,G=32,H=2048,fused=no", "us": 432.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_fp8", "shape": "M=24576,G=32,H=5120", "us": 313.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_requantize", "shape": "M=24576,G=32,H=5120,fused=no", "us": 956.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_fp8", "shape": "M=32768,G=32,H=7168", "us": 590.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_requantize", "shape": "M=32768,G=32,H=7168,fused=no", "us": 1523.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_fp8", "shape": "M=32768,G=32,H=8192", "us": 662.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_requantize", "shape": "M=32768,G=32,H=8192,fused=no", "us": 1721.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_fp8", "shape": "M=32768,G=32,H=9216", "us": 734.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "transpose_requantize", "shape": "M=32768,G=32,H=9216,fused=no", "us": 1923.0, "peer": "authors", "source": "NVIDIA/TransformerEngine#2544"}
{"operation": "swiglu_quantize", "shape": "M=28672,G=64,rows=ragged,F=1024", "us": 61.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_quantize", "shape": "M=28672,G=64,rows=ragged,F=1024,fused=no", "us": 103.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_backward_quantize", "shape": "M=28672,G=64,rows=ragged,F=1024", "us": 100.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_backward_quantize", "shape": "M=28672,G=64,rows=ragged,F=1024,fused=no", "us": 256.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_quantize", "shape": "M=24576,G=64,rows=ragged,F=1408", "us": 66.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_quantize", "shape": "M=24576,G=64,rows=ragged,F=1408,fused=no", "us": 138.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_backward_quantize", "shape": "M=24576,G=64,rows=ragged,F=1408", "us": 116.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_backward_quantize", "shape": "M=24576,G=64,rows=ragged,F=1408,fused=no", "us": 454.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_quantize", "shape": "M=24576,G=160,rows=ragged,F=1536", "us": 72.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_quantize", "shape": "M=24576,G=160,rows=ragged,F=1536,fused=no", "us": 149.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_backward_quantize", "shape": "M=24576,G=160,rows=ragged,F=1536", "us": 125.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_backward_quantize", "shape": "M=24576,G=160,rows=ragged,F=1536,fused=no", "us": 489.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_quantize", "shape": "M=32768,G=256,rows=ragged,F=2048", "us": 118.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_quantize", "shape": "M=32768,G=256,rows=ragged,F=2048,fused=no", "us": 257.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_backward_quantize", "shape": "M=32768,G=256,rows=ragged,F=2048", "us": 211.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "swiglu_backward_quantize", "shape": "M=32768,G=256,rows=ragged,F=2048,fused=no", "us": 846.0, "peer": "authors", "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=64,H=2048,K=6,wire=bf16", "us": 537.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=64,H=2048,K=6,wire=fp8", "us": 325.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=64,H=2048,K=6,wire=fp8_casts", "us": 535.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=160,H=5120,K=6,wire=bf16", "us": 785.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=160,H=5120,K=6,wire=fp8", "us": 526.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=160,H=5120,K=6,wire=fp8_casts", "us": 703.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=256,H=7168,K=8,wire=bf16", "us": 1276.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=256,H=7168,K=8,wire=fp8", "us": 905.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "dispatch", "shape": "T=4096,E=256,H=7168,K=8,wire=fp8_casts", "us": 1080.0, "peer": "authors", "gpus": 8, "source": "NVIDIA/Megatron-LM#2764"}
{"operation": "quantize_columns", "shape": "M=32768,G=32,rows=ragged,align=16,H=7168", "us": 449.0, "peer": "authors", "gpu": "MI300X", "source": "pytorch/ao#4113"}
)peers";
// clang-format on

}  // namespace fp8flow::bench
