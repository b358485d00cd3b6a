# SPDX-License-Identifier: MIT
"""fp8flow on PyTorch tensors: the operations of FP8 experts, and one MoE layer with gradients (docs/usage/pytorch.md).

CUDA tensors run on the Hopper backend and the current stream, CPU tensors on the reference backend. Nothing here waits for the GPU.
"""
from .library import Error
from .moe_layer import MoELayer
from .operations import (Groups, Plan, Scaled, grouped_gemm, grouped_gemm_wgrad, make_plan, permute_pad, quantize_columns, quantize_rows,
                         quantize_weight, swiglu_quantize, transpose_fp8, unpermute)

__all__ = ["Error", "Groups", "MoELayer", "Plan", "Scaled", "grouped_gemm", "grouped_gemm_wgrad", "make_plan", "permute_pad",
           "quantize_columns", "quantize_rows", "quantize_weight", "swiglu_quantize", "transpose_fp8", "unpermute"]
