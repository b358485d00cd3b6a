# SPDX-License-Identifier: MIT
"""The operations of FP8 experts as functions on tensors. No gradients: `MoELayer` has them.

Letters: T tokens, K choices a token, E experts, H hidden size, F width of an expert, M routed rows with pads. Rows are sorted by expert;
those of expert g begin at row offsets[g], a multiple of the alignment, and pads follow them. Pads come out as zeros, and rows past
offsets[E] are not written. Scales multiply: value = code * scale. What each operation computes, to the bit: kernels/ops/*.h.
"""
import ctypes
import dataclasses
from typing import Optional, Tuple, Union

import torch

from .library import (LAYOUTS, LIBRARY, SCALE_FORMATS, CGroups, CPlan, CScaled, call, context_of, int64, pointer, tensor)

BLOCK = 128
E4M3, F32 = torch.float8_e4m3fn, torch.float32
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (torch.float32, torch.bfloat16)


@dataclasses.dataclass
class Scaled:
    """FP8 values (`codes`) with their scales. layout of values [R, C] (weights: [E, R, C]), divisions rounded up:
    vec128_wire  1x128 blocks, scales [R, C/128] float8_e8m0fnu, or float32 for scale_format fp32; rows on a wire
    vec128       1x128 blocks, scales [C/128, R] float32; operands of GEMMs
    block128     128x128 blocks, scales [E, R/128, C/128 padded to a multiple of 4] float32; weights
    tile128      128x128 tiles of a transposed copy [dim, M], scales [M/128, dim/128] float32
    scale_format: pow2 if all scales are powers of two, as transpose_fp8 needs, or fp32. Quantisers set it. The caller declares it for
    other scales (None: undeclared). On CPU tensors the library also checks the scales; on a GPU it relies on the declaration.
    """
    codes: torch.Tensor
    scales: torch.Tensor
    layout: str
    scale_format: Optional[str] = None


@dataclasses.dataclass
class Groups:
    """Rows by expert: counts [E] and offsets [E + 1], int64 on the device of the rows; row_capacity: M."""
    counts: torch.Tensor
    offsets: torch.Tensor
    row_capacity: int
    alignment: int = BLOCK


@dataclasses.dataclass
class Plan:
    """Which token goes to which row (make_plan)."""
    groups: Groups
    row_source: torch.Tensor  # [M] int32: the token that feeds row r; -1: a pad, or past the last expert's rows
    row_prob: torch.Tensor  # [M] float32: its probability; 0 where row_source is -1
    token_rows: torch.Tensor  # [T, K] int32: rows of token t, in ascending experts
    token_offsets: torch.Tensor  # [2] int64: 0, T


def check(value, name, dtypes, shape, device=None):
    """Raises ValueError unless `value` is a contiguous tensor of one of `dtypes` and of `shape` (None: any size), on `device`."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, want a tensor")
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if value.dtype not in dtypes:
        raise ValueError(f"{name} is {value.dtype}, want {' or '.join(str(d) for d in dtypes)}")
    if value.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, value.shape)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} is {list(value.shape)}, want [{wanted}]")
    if not value.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {value.stride()} for {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}, want {device}")
    return value


def blocks(size):
    return -(-size // BLOCK)


def scale_shape(layout, codes_shape):
    *batch, rows, cols = codes_shape
    return {"vec128_wire": [*batch, rows, blocks(cols)], "vec128": [*batch, blocks(cols), rows],
            "block128": [*batch, blocks(rows), (blocks(cols) + 3) // 4 * 4], "tile128": [*batch, blocks(cols), blocks(rows)]}[layout]


def empty_scaled(shape, layout, device, scale_format="pow2"):
    scale_dtype = torch.float8_e8m0fnu if layout == "vec128_wire" and scale_format == "pow2" else F32
    return Scaled(torch.empty(shape, dtype=E4M3, device=device), torch.empty(scale_shape(layout, shape), dtype=scale_dtype, device=device),
                  layout, scale_format)


def check_scaled(value, name, layouts, shape, device=None):
    if not isinstance(value, Scaled) or value.layout not in layouts:
        have = f"has layout {value.layout}" if isinstance(value, Scaled) else f"is a {type(value).__name__}"
        raise ValueError(f"{name} {have}, want Scaled of layout {' or '.join(layouts)}")
    check(value.codes, name + ".codes", (E4M3, torch.float8_e5m2), shape, device)
    if value.scale_format not in (None, *SCALE_FORMATS):
        raise ValueError(f"{name}.scale_format is {value.scale_format!r}, want {' or '.join(SCALE_FORMATS)}")
    dtypes = (torch.float8_e8m0fnu, F32) if value.layout == "vec128_wire" else F32
    check(value.scales, name + ".scales", dtypes, scale_shape(value.layout, value.codes.shape), value.codes.device)
    return value


def c_scaled(value):
    """A CScaled, by reference; plain tensors have no scales."""
    if isinstance(value, Scaled):
        return ctypes.byref(CScaled(tensor(value.codes), tensor(value.scales), LAYOUTS[value.layout],
                                    SCALE_FORMATS.get(value.scale_format, 0)))
    return ctypes.byref(CScaled(codes=tensor(value)))


def c_tensor(value):
    return ctypes.byref(tensor(value))


def check_groups(groups, device, rows=None):
    """A CGroups; `rows`: of the tensor that it divides."""
    check(groups.counts, "groups.counts", torch.int64, (None,), device)
    check(groups.offsets, "groups.offsets", torch.int64, (groups.counts.numel() + 1,), device)
    if rows is not None and rows < groups.row_capacity:
        raise ValueError(f"{rows} rows, want the row capacity of the groups, {groups.row_capacity}")
    return CGroups(groups.counts.numel(), groups.counts.data_ptr(), groups.offsets.data_ptr(), groups.row_capacity, groups.alignment)


def optional_groups(groups, device, rows):
    return None if groups is None else ctypes.byref(check_groups(groups, device, rows))


def format_of(name):
    if name not in SCALE_FORMATS:
        raise ValueError(f"scale_format is {name!r}, want {' or '.join(SCALE_FORMATS)}")
    return SCALE_FORMATS[name]


def quantize_rows(x: torch.Tensor, groups: Optional[Groups] = None, layout: str = "vec128", scale_format: str = "pow2") -> Scaled:
    """[M, C] float32, bfloat16 or float16 -> FP8 [M, C] in 1x128 blocks, layout vec128 or vec128_wire."""
    check(x, "x", FLOATS, (None, None))
    if layout not in ("vec128", "vec128_wire"):
        raise ValueError(f"layout is {layout!r}, want vec128 or vec128_wire")
    form = format_of(scale_format)
    out = empty_scaled(x.shape, layout, x.device, scale_format)
    call("quantize_rows", x.device, context_of(x.device), c_tensor(x), optional_groups(groups, x.device, len(x)), form, c_scaled(out))
    return out


def quantize_columns(x: torch.Tensor, groups: Optional[Groups] = None, scale_format: str = "pow2") -> Scaled:
    """[M, C] float32, bfloat16 or float16 -> transposed FP8 [C, M], vec128: 128x1 blocks of x, counted from a group's first row."""
    check(x, "x", FLOATS, (None, None))
    form = format_of(scale_format)
    out = empty_scaled((x.shape[1], x.shape[0]), "vec128", x.device, scale_format)
    call("quantize_columns", x.device, context_of(x.device), c_tensor(x), optional_groups(groups, x.device, len(x)), form, c_scaled(out))
    return out


def quantize_weight(w: torch.Tensor, scale_format: str = "pow2") -> Tuple[Scaled, Scaled]:
    """[E, N, K] float32 or bfloat16 -> FP8 [E, N, K] and its exact transpose [E, K, N], both block128: the operands of the forward
    and of the gradient of its input."""
    check(w, "w", PLAIN, (None, None, None))
    form = format_of(scale_format)
    experts, n, k = w.shape
    fprop, dgrad = (empty_scaled(shape, "block128", w.device, scale_format) for shape in ((experts, n, k), (experts, k, n)))
    call("quantize_weight", w.device, context_of(w.device), c_tensor(w), form, c_scaled(fprop), c_scaled(dgrad))
    return fprop, dgrad


def transpose_fp8(x: Scaled, groups: Optional[Groups] = None) -> Scaled:
    """Scaling-aware: FP8 [M, dim] vec128 of scale_format pow2 -> [dim, M] tile128, by shifts of exponents."""
    check_scaled(x, "x", ("vec128",), (None, None))
    if x.scale_format != "pow2":
        raise ValueError(f"x.scale_format is {x.scale_format!r}, want 'pow2': exponents are shifted and mantissas of scales ignored")
    rows, dim = x.codes.shape
    device = x.codes.device
    out = empty_scaled((dim, rows), "tile128", device)
    out.codes = out.codes.view(x.codes.dtype)
    call("transpose_fp8", device, context_of(device), c_scaled(x), optional_groups(groups, device, rows), c_scaled(out))
    return out


def make_plan(ids: torch.Tensor, probs: torch.Tensor, num_experts: int, alignment: int = BLOCK) -> Plan:
    """Rows for the tokens' choices: ids [T, K] int32 or int64, different in a row and in [0, num_experts); probs [T, K] float32. Rows
    of an expert are in ascending tokens. M is sized for the worst routing, so that the host need not know the sizes. Other ids are refused;
    on a GPU, where nothing waits to read them, by an assertion on the device, as torch's own indexing does."""
    check(ids, "ids", (torch.int32, torch.int64), (None, None))
    check(probs, "probs", F32, tuple(ids.shape), ids.device)
    ids = ids.clamp(-2**31, 2**31 - 1).to(torch.int32)
    (tokens, choices), device = ids.shape, ids.device
    capacity = LIBRARY.fp8flow_max_rows(int64(tokens), int64(choices), int64(num_experts), int64(alignment))
    if capacity < 0:
        raise ValueError(f"{tokens} tokens, {choices} choices, {num_experts} experts, alignment {alignment}: want positive numbers, and rows "
                         "that fit 32 bits")

    def empty(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device=device)

    groups = Groups(empty(torch.int64, num_experts), empty(torch.int64, num_experts + 1), capacity, alignment)
    plan = Plan(groups, empty(torch.int32, capacity), empty(F32, capacity), empty(torch.int32, tokens, choices), empty(torch.int64, 2))
    call("plan_rows", device, context_of(device), c_tensor(ids), c_tensor(probs), ctypes.byref(c_plan(plan, device)))
    if device.type == "cuda":  # such an id has no row, or shares one
        torch._assert_async(groups.counts.sum() == ids.numel(), f"make_plan: ids differ in a row and are in [0, {num_experts})")
    return plan


def c_plan(plan, device):
    check(plan.row_source, "plan.row_source", torch.int32, (plan.groups.row_capacity,), device)
    check(plan.row_prob, "plan.row_prob", F32, (plan.groups.row_capacity,), device)
    check(plan.token_rows, "plan.token_rows", torch.int32, (None, None), device)
    check(plan.token_offsets, "plan.token_offsets", torch.int64, (2,), device)
    return CPlan(check_groups(plan.groups, device), plan.row_source.data_ptr(), plan.row_prob.data_ptr(), plan.token_rows.data_ptr(),
                 plan.token_offsets.data_ptr(), *plan.token_rows.shape)


def permute_pad(x: Union[torch.Tensor, Scaled], plan: Plan) -> Union[torch.Tensor, Scaled]:
    """Tokens [T, H] -> rows [M, H], sorted and padded in one pass: float32 or bfloat16, or Scaled vec128_wire -> vec128."""
    tokens = plan.token_rows.shape[0]
    if isinstance(x, Scaled):
        check_scaled(x, "x", ("vec128_wire",), (tokens, None))
        device, shape = x.codes.device, (plan.groups.row_capacity, x.codes.shape[1])
        out = empty_scaled(shape, "vec128", device, "pow2" if x.scales.dtype == torch.float8_e8m0fnu else x.scale_format)
        out.codes = out.codes.view(x.codes.dtype)
    else:
        check(x, "x", PLAIN, (tokens, None))
        device = x.device
        out = torch.empty((plan.groups.row_capacity, x.shape[1]), dtype=x.dtype, device=device)
    call("permute_pad", device, context_of(device), c_scaled(x), ctypes.byref(c_plan(plan, device)), c_scaled(out))
    return out


def unpermute(rows: torch.Tensor, plan: Plan, weights: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Rows [M, H] float32 or bfloat16 -> tokens [T, H]: a token's rows, times weights [M] float32 (plan.row_prob) if given, summed in
    float32 in ascending experts."""
    check(rows, "rows", PLAIN, (plan.groups.row_capacity, None))
    if weights is not None:
        check(weights, "weights", F32, (len(rows),), rows.device)
    out = torch.empty((plan.token_rows.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    call("unpermute", rows.device, context_of(rows.device), c_tensor(rows), ctypes.byref(c_plan(plan, rows.device)),
         None if weights is None else pointer(weights.data_ptr()), c_tensor(out))
    return out


def grouped_gemm(a: Union[torch.Tensor, Scaled], b: Union[torch.Tensor, Scaled], groups: Groups,
                 out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """d[r] = a[r] b[g]^T for the rows r of every group g: a [M, K] vec128, b [E, N, K] block128, or both plain of one dtype; d [M, N]
    bfloat16 or float32. FP8: float32 sums of 128 products, each times both scales, added in float32."""
    if isinstance(a, Scaled):
        check_scaled(a, "a", ("vec128",), (None, None))
        codes = a.codes
        check_scaled(b, "b", ("block128",), (len(groups.counts), None, codes.shape[1]), codes.device)
        n = b.codes.shape[1]
    else:
        codes = check(a, "a", PLAIN, (None, None))
        n = check(b, "b", a.dtype, (len(groups.counts), None, a.shape[1]), a.device).shape[1]
    if out_dtype not in PLAIN:
        raise ValueError(f"out_dtype is {out_dtype}, want float32 or bfloat16")
    c_groups = check_groups(groups, codes.device, len(codes))
    d = torch.empty((len(codes), n), dtype=out_dtype, device=codes.device)
    call("grouped_gemm", codes.device, context_of(codes.device), c_scaled(a), c_scaled(b), ctypes.byref(c_groups), c_tensor(d))
    return d


def grouped_gemm_wgrad(dy: Union[torch.Tensor, Scaled], x: Union[torch.Tensor, Scaled], groups: Groups) -> torch.Tensor:
    """dw[g] = dy_g^T x_g over the rows of every group g, float32 [E, N, K]. FP8: transposed copies dy [N, M], x [K, M], tile128
    (transpose_fp8) or vec128 (quantize_columns); plain, of one dtype: dy [M, N], x [M, K]."""
    if isinstance(dy, Scaled):
        check_scaled(dy, "dy", ("tile128", "vec128"), (None, None))
        check_scaled(x, "x", (dy.layout,), (None, dy.codes.shape[1]), dy.codes.device)
        device, rows, shape = dy.codes.device, dy.codes.shape[1], (dy.codes.shape[0], x.codes.shape[0])
    else:
        check(dy, "dy", PLAIN, (None, None))
        check(x, "x", dy.dtype, (len(dy), None), dy.device)
        device, rows, shape = dy.device, len(dy), (dy.shape[1], x.shape[1])
    c_groups = check_groups(groups, device, rows)
    dw = torch.empty((len(groups.counts), *shape), dtype=F32, device=device)
    call("grouped_gemm_wgrad", device, context_of(device), c_scaled(dy), c_scaled(x), ctypes.byref(c_groups), c_tensor(dw))
    return dw


def swiglu_quantize(h: torch.Tensor, prob: Optional[torch.Tensor] = None, groups: Optional[Groups] = None,
                    scale_format: str = "pow2") -> Scaled:
    """h = [gate, up] float32 or bfloat16 [M, 2F], prob [M] float32 (none: 1) -> silu(gate) * up * prob as FP8 [M, F], vec128, straight
    from float32. F is a multiple of 128."""
    check(h, "h", PLAIN, (None, None))
    if h.shape[1] % (2 * BLOCK) != 0:
        raise ValueError(f"h has {h.shape[1]} columns, want a multiple of {2 * BLOCK}: gate and up")
    if prob is not None:
        check(prob, "prob", F32, (len(h),), h.device)
    form = format_of(scale_format)
    out = empty_scaled((h.shape[0], h.shape[1] // 2), "vec128", h.device, scale_format)
    call("swiglu_quantize", h.device, context_of(h.device), c_tensor(h), None if prob is None else pointer(prob.data_ptr()),
         optional_groups(groups, h.device, len(h)), form, c_scaled(out))
    return out
