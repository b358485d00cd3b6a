# SPDX-License-Identifier: MIT
"""Each operation against plain torch on the same values: bit for bit what copies or quantises, GEMMs against float64."""
import dataclasses
import pathlib
import re

import pytest
import torch

import fp8flow

E4M3 = torch.float8_e4m3fn


# ---- plain torch, on the CPU

def bits(x):
    return x.cpu().contiguous().view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def multiplier_of(amax, scale_format):
    """docs/numerics.md, the quantisation rule: 448 / maximum, rounded down to a power of two for pow2."""
    amax = amax.clamp(min=2.0**-100)
    if scale_format == "fp32":
        return (torch.full_like(amax, 448) / amax).clamp(max=2.0**126)  # 448 / amax would be a product with the reciprocal
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa 2^exponent, mantissa in [0.5, 1); 448 = 0.875 * 2^9
    return torch.ldexp(torch.ones_like(amax), 9 - exponent - (mantissa > 0.875).int())


def quantize(x, scale_format="pow2"):
    """Codes [M, C] and scales [M, C / 128] of 1x128 blocks."""
    blocks = x.float().reshape(x.shape[0], -1, 128)
    multiplier = multiplier_of(blocks.abs().amax(-1), scale_format)
    codes = (blocks * multiplier[..., None]).clamp(-448, 448).to(E4M3)
    return codes.reshape(x.shape), 1 / multiplier


def dequantize(codes, scales):
    """float64 of codes [M, C] and scales [M, C / 128]."""
    return codes.double() * scales.double().repeat_interleave(128, 1)[:, :codes.shape[1]]


def routing(tokens, choices, experts, device):
    logits = torch.randn(tokens, experts)
    logits[:, 1] = -9  # an expert without tokens
    values, ids = logits.topk(choices)
    return ids.to(device), values.softmax(-1).to(device)


class Routed:
    """A plan on the device, and the same on the host by hand."""

    def __init__(self, device, tokens=200, choices=2, experts=5):
        self.ids, self.probs = routing(tokens, choices, experts, device)
        self.plan = fp8flow.make_plan(self.ids, self.probs, experts)
        self.tokens, self.experts = tokens, experts
        ids, probs = self.ids.cpu(), self.probs.cpu()
        self.rows_of, self.first, end = [], [], 0  # of an expert: its tokens, its first row
        for expert in range(experts):
            tokens_of = (ids == expert).any(1).nonzero().flatten()
            self.rows_of.append(tokens_of)
            self.first.append(end)
            end += -(-len(tokens_of) // 128) * 128
        self.end = end
        self.source, self.prob = torch.full((end,), -1, dtype=torch.int32), torch.zeros(end)
        for first, tokens_of, expert in zip(self.first, self.rows_of, range(experts)):
            self.source[first:first + len(tokens_of)] = tokens_of.int()
            self.prob[first:first + len(tokens_of)] = probs[tokens_of][ids[tokens_of] == expert]

    def sorted(self, x):
        """Rows [end, ...] of x [T, ...]; zeros in pads."""
        rows = x[self.source.long().clamp(min=0)].clone()
        rows.view(torch.uint8)[self.source < 0] = 0
        return rows

    def random_rows(self, width, device, dtype=torch.bfloat16):
        """[M, width], with values in pads that nobody may read."""
        x = torch.randn(self.plan.groups.row_capacity, width).to(dtype)
        return x.to(device)


# ---- quantisers

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_quantize_rows(device, dtype, scale_format):
    x = torch.randn(70, 384) * torch.logspace(-6, 3, 70)[:, None]
    x[3, :128] = 0
    x = x.to(dtype)
    codes, scales = quantize(x, scale_format)
    q = fp8flow.quantize_rows(x.to(device), scale_format=scale_format)
    assert same(q.codes, codes) and same(q.scales, scales.T)
    wire = fp8flow.quantize_rows(x.to(device), layout="vec128_wire", scale_format=scale_format)
    assert same(wire.codes, codes)
    assert wire.scales.dtype == (torch.float8_e8m0fnu if scale_format == "pow2" else torch.float32)
    assert torch.equal(wire.scales.float().cpu(), scales)


def test_quantize_rows_in_groups(device):
    routed = Routed(device)
    x = routed.random_rows(256, device)
    q = fp8flow.quantize_rows(x, routed.plan.groups)
    codes, scales = quantize(x[:routed.end].cpu())
    codes.view(torch.uint8)[routed.source < 0] = 0
    scales[routed.source < 0] = 0
    assert same(q.codes[:routed.end], codes) and same(q.scales[:, :routed.end], scales.T)


def test_quantize_columns(device):
    x = torch.randn(256, 384) * torch.logspace(-3, 3, 256)[:, None]
    codes, scales = quantize(x.T.contiguous())
    q = fp8flow.quantize_columns(x.to(device))
    assert same(q.codes, codes) and same(q.scales, scales.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_weight(device, dtype):
    w = (torch.randn(3, 256, 640) * torch.logspace(-2, 2, 256)[:, None]).to(dtype)
    fprop, dgrad = fp8flow.quantize_weight(w.to(device))
    blocks = w.float().reshape(3, 2, 128, 5, 128)
    multiplier = multiplier_of(blocks.abs().amax((2, 4)), "pow2")
    codes = (blocks * multiplier[:, :, None, :, None]).to(E4M3).reshape(w.shape)
    scales = torch.zeros(3, 2, 8)  # 5 columns padded to 8
    scales[:, :, :5] = 1 / multiplier
    assert same(fprop.codes, codes) and same(fprop.scales, scales)
    assert same(dgrad.codes, codes.view(torch.uint8).mT.contiguous().view(E4M3))
    assert torch.equal(dgrad.scales.cpu()[:, :, :2], scales[:, :, :5].mT) and not dgrad.scales[:, :, 2:].any()


def test_transpose_fp8(device):
    x = torch.randn(256, 384) * torch.logspace(-6, 3, 256)[:, None]
    q = fp8flow.quantize_rows(x.to(device))
    t = fp8flow.transpose_fp8(q)
    codes, scales = q.codes.cpu().float(), q.scales.cpu().T  # [M, dim], [M, dim / 128]
    tile = scales.reshape(2, 128, 3).amax(1)
    shift = scales / tile.repeat_interleave(128, 0)  # 2^-k
    wanted = (codes * shift.repeat_interleave(128, 1)).to(E4M3)
    assert same(t.codes, wanted.view(torch.uint8).T.contiguous().view(E4M3)) and same(t.scales, tile)


# ---- plan, permute

def test_make_plan(device):
    routed = Routed(device)
    plan = routed.plan
    assert plan.groups.counts.tolist() == [len(rows) for rows in routed.rows_of]
    assert plan.groups.offsets.tolist() == routed.first + [routed.end]
    assert torch.equal(plan.row_source[:routed.end].cpu(), routed.source)
    assert torch.equal(plan.row_prob[:routed.end].cpu(), routed.prob)
    token_rows = plan.token_rows.cpu().long()
    assert torch.equal(routed.source[token_rows], torch.arange(routed.tokens, dtype=torch.int32)[:, None].expand(-1, 2))
    assert bool((token_rows[:, 0] < token_rows[:, 1]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permute_and_back(device, dtype):
    routed = Routed(device)
    x = torch.randn(routed.tokens, 256).to(dtype)
    rows = fp8flow.permute_pad(x.to(device), routed.plan)
    assert same(rows[:routed.end], routed.sorted(x))
    token_rows = routed.plan.token_rows.cpu().long()
    y = torch.randn(routed.plan.groups.row_capacity, 256).to(dtype)
    assert same(fp8flow.unpermute(y.to(device), routed.plan), y.float()[token_rows].sum(1).to(dtype))
    weighted = fp8flow.unpermute(y.to(device), routed.plan, routed.plan.row_prob).cpu().double()
    wanted = (y.double()[token_rows] * routed.prob.double()[token_rows][..., None]).sum(1)
    torch.testing.assert_close(weighted, wanted, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_permute_fp8(device):
    routed = Routed(device)
    x = torch.randn(routed.tokens, 256)
    rows = fp8flow.permute_pad(fp8flow.quantize_rows(x.to(device), layout="vec128_wire"), routed.plan)
    codes, scales = quantize(x)
    assert rows.layout == "vec128"
    assert same(rows.codes[:routed.end], routed.sorted(codes)) and same(rows.scales[:, :routed.end], routed.sorted(scales).T)


# ---- experts

def relative(a, b):
    return float((a.double().cpu() - b).norm() / b.norm())


@pytest.mark.parametrize("out_dtype,bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("fp8", [True, False])
def test_grouped_gemm(device, out_dtype, bound, fp8):
    if fp8 and torch.device(device).type == "cuda":
        bound = max(bound, 2**-11)  # Hopper's tensor cores add FP8 products with 14 bits
    routed = Routed(device)
    a, w = routed.random_rows(256, device), torch.randn(routed.experts, 384, 256).to(torch.bfloat16).to(device)
    groups = routed.plan.groups
    if fp8:
        qa, (qw, _) = fp8flow.quantize_rows(a, groups), fp8flow.quantize_weight(w)
        d = fp8flow.grouped_gemm(qa, qw, groups, out_dtype)
        a64 = dequantize(qa.codes[:routed.end].cpu(), qa.scales[:, :routed.end].cpu().T)
        w64 = qw.codes.cpu().double() * qw.scales.cpu().double()[:, :, :2].repeat_interleave(128, 1).repeat_interleave(128, 2)
    else:
        d = fp8flow.grouped_gemm(a, w, groups, out_dtype)
        a64, w64 = a[:routed.end].cpu().double(), w.cpu().double()
    assert d.dtype == out_dtype and d.shape == (groups.row_capacity, 384)
    wanted = torch.zeros(routed.end, 384, dtype=torch.float64)
    for expert, (first, tokens) in enumerate(zip(routed.first, routed.rows_of)):
        rows = slice(first, first + len(tokens))
        wanted[rows] = a64[rows] @ w64[expert].T
    assert relative(d[:routed.end], wanted) < bound
    assert not d[:routed.end].cpu()[routed.source < 0].any()


@pytest.mark.parametrize("layout", ["tile128", "vec128", "plain"])
def test_grouped_gemm_wgrad(device, layout):
    routed = Routed(device)
    groups = routed.plan.groups
    dy, x = routed.random_rows(128, device), routed.random_rows(256, device)
    if layout == "plain":
        dw = fp8flow.grouped_gemm_wgrad(dy, x, groups)
    elif layout == "vec128":
        dw = fp8flow.grouped_gemm_wgrad(fp8flow.quantize_columns(dy, groups), fp8flow.quantize_columns(x, groups), groups)
    else:
        dw = fp8flow.grouped_gemm_wgrad(*[fp8flow.transpose_fp8(fp8flow.quantize_rows(v, groups), groups) for v in (dy, x)], groups)
    wanted = torch.zeros(routed.experts, 128, 256, dtype=torch.float64)
    for expert, (first, tokens) in enumerate(zip(routed.first, routed.rows_of)):
        rows = slice(first, first + len(tokens))
        wanted[expert] = dy[rows].cpu().double().T @ x[rows].cpu().double()
    assert dw.dtype == torch.float32
    assert relative(dw, wanted) < (1e-5 if layout == "plain" else 0.06)  # E4M3 rounds by up to 1/16
    assert not dw[1].any()


@pytest.mark.parametrize("grouped", [True, False])
def test_swiglu_quantize(device, grouped):
    routed = Routed(device)
    h = routed.random_rows(512, device)
    groups, prob = (routed.plan.groups, routed.plan.row_prob) if grouped else (None, None)
    q = fp8flow.swiglu_quantize(h, prob, groups)
    end = routed.end if grouped else len(h)
    gate, up = h[:end].cpu().double().chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    if grouped:
        wanted *= routed.prob.double()[:, None]  # 0 in pads
    codes, scales = quantize(wanted.float())
    if grouped:
        scales[routed.source < 0] = 0
        codes.view(torch.uint8)[routed.source < 0] = 0
    assert same(q.scales[:, :end], scales.T)
    equal = bits(q.codes[:end]) == bits(codes)  # the last bit of silu may round a code to its neighbour
    assert equal.double().mean() > 0.9999
    assert relative(dequantize(q.codes[:end].cpu(), q.scales[:, :end].cpu().T), wanted) < 0.04


def test_the_page_runs(device):
    """The lines of docs/usage/pytorch.md: a MoE layer's forward by operations, against float64."""
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "usage" / "pytorch.md"
    lines = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)[1]
    x, router = torch.randn(64, 256).bfloat16(), torch.randn(16, 256).bfloat16()
    w1, w2 = (torch.randn(16, 512, 256) / 16).bfloat16(), (torch.randn(16, 256, 256) / 16).bfloat16()
    names = dict(zip(("x", "router", "w1", "w2"), (v.to(device) for v in (x, router, w1, w2))), fp8flow=fp8flow, num_experts=16)
    exec(lines, names)
    ids, probs = names["ids"].cpu(), names["probs"].cpu().double()
    wanted = torch.zeros(64, 256, dtype=torch.float64)
    for token in range(64):
        for expert, prob in zip(ids[token], probs[token]):
            gate, up = (w1[expert].double() @ x[token].double()).chunk(2)
            wanted[token] += prob * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    assert 0.001 < relative(names["y"], wanted) < 0.08


# ---- scale formats

def test_scale_format_goes_with_the_tensor(device):
    x = torch.randn(128, 256, device=device)
    groups = fp8flow.make_plan(torch.zeros(128, 1, dtype=torch.int32, device=device), torch.ones(128, 1, device=device), 1)
    for scale_format in ("pow2", "fp32"):
        made = [fp8flow.quantize_rows(x, scale_format=scale_format), fp8flow.quantize_columns(x, scale_format=scale_format),
                *fp8flow.quantize_weight(x[None], scale_format), fp8flow.swiglu_quantize(x, scale_format=scale_format)]
        wire = fp8flow.quantize_rows(x, layout="vec128_wire", scale_format=scale_format)
        made += [wire, fp8flow.permute_pad(wire, groups)]
        assert [q.scale_format for q in made] == [scale_format] * len(made)
    refused("x.scale_format is 'fp32', want 'pow2'", fp8flow.transpose_fp8, fp8flow.permute_pad(wire, groups))
    refused("x.scale_format is 'fp32', want 'pow2'", fp8flow.transpose_fp8, fp8flow.quantize_rows(x, scale_format="fp32"))
    q = fp8flow.quantize_rows(x)
    assert fp8flow.transpose_fp8(q).scale_format == "pow2"
    by_hand = fp8flow.Scaled(q.codes, q.scales, "vec128")
    refused("x.scale_format is None, want 'pow2'", fp8flow.transpose_fp8, by_hand)
    refused("x.scale_format is 'e8m0', want pow2 or fp32", fp8flow.transpose_fp8, dataclasses.replace(q, scale_format="e8m0"))
    assert same(fp8flow.transpose_fp8(dataclasses.replace(by_hand, scale_format="pow2")).codes, fp8flow.transpose_fp8(q).codes)
    if device.type == "cpu":
        with pytest.raises(fp8flow.Error, match="src declares scales pow2, and that of row 0") as caught:
            fp8flow.transpose_fp8(dataclasses.replace(q, scales=q.scales * 1.226))
        assert caught.value.status == 2


# ---- ids that name no expert, none at all

def test_make_plan_fills_every_row(device):
    routed = Routed(device)
    rest = slice(routed.end, None)
    assert routed.end < routed.plan.groups.row_capacity
    assert bool((routed.plan.row_source[rest] == -1).all()) and not routed.plan.row_prob[rest].any()
    assert int((routed.plan.row_source >= 0).sum()) == routed.ids.numel()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong,text", [(5, "names expert 5, want 0 to 4"), (-1, "names expert -1"), (1 << 32, "names expert 2147483647"),
                                        ("twice", "twice")])
def test_make_plan_refuses_ids(dtype, wrong, text):
    routed = Routed("cpu")
    ids = routed.ids.to(dtype)
    if wrong == 1 << 32 and dtype == torch.int32:
        return
    ids[7, 1] = ids[7, 0] if wrong == "twice" else wrong
    with pytest.raises(fp8flow.Error, match="token 7 " + (text if wrong != "twice" else "names expert [0-4] twice")) as caught:
        fp8flow.make_plan(ids, routed.probs, 5)
    assert caught.value.status == 2


def test_no_tokens(device):
    ids, probs = torch.empty(0, 2, dtype=torch.int64, device=device), torch.empty(0, 2, device=device)
    plan = fp8flow.make_plan(ids, probs, 4)
    assert plan.groups.counts.tolist() == [0] * 4 and plan.groups.offsets.tolist() == [0] * 5
    assert bool((plan.row_source == -1).all()) and plan.token_offsets.tolist() == [0, 0]
    x = torch.empty(0, 256, device=device)
    rows = fp8flow.permute_pad(fp8flow.quantize_rows(x, layout="vec128_wire"), plan)
    fp8flow.permute_pad(x, plan)
    w1, w2 = torch.randn(4, 512, 256, device=device), torch.randn(4, 256, 256, device=device)
    h = fp8flow.grouped_gemm(rows, fp8flow.quantize_weight(w1)[0], plan.groups)
    a = fp8flow.swiglu_quantize(h, plan.row_prob, plan.groups)
    y = fp8flow.unpermute(fp8flow.grouped_gemm(a, fp8flow.quantize_weight(w2)[0], plan.groups), plan)
    assert y.shape == (0, 256)
    dw = fp8flow.grouped_gemm_wgrad(fp8flow.transpose_fp8(a, plan.groups), fp8flow.transpose_fp8(rows, plan.groups), plan.groups)
    assert not dw.any()
    for q in (fp8flow.quantize_rows(x), fp8flow.quantize_columns(x), fp8flow.swiglu_quantize(x)):
        assert q.codes.numel() == 0
    assert fp8flow.transpose_fp8(fp8flow.quantize_rows(x)).codes.shape == (256, 0)


def test_refuses_groups_that_lie_outside(device):
    if device.type != "cpu":
        return  # device data
    x, counts, offsets = torch.randn(256, 256), torch.tensor([200, 3]), torch.tensor([0, 256, 384])
    with pytest.raises(fp8flow.Error, match="group 1 has 3 rows from row 256 to 384, want them inside a capacity of 256"):
        fp8flow.quantize_rows(x, fp8flow.Groups(counts, offsets, 256))
    with pytest.raises(fp8flow.Error, match="group 0 has 200 rows"):
        fp8flow.quantize_columns(x, fp8flow.Groups(counts, torch.tensor([0, 128, 256]), 256))


# ---- what is refused

def refused(text, function, *arguments, **options):
    with pytest.raises(ValueError) as caught:
        function(*arguments, **options)
    assert text in str(caught.value), str(caught.value)


def test_refuses(device):
    x = torch.randn(128, 256, device=device)
    routed = Routed(device)
    groups, plan = routed.plan.groups, routed.plan
    q = fp8flow.quantize_rows(x)
    refused("x is torch.int32, want torch.float32 or", fp8flow.quantize_rows, x.int())
    refused("x is [256], want [any, any]", fp8flow.quantize_rows, x[0])
    refused("x is not contiguous: strides (1, 256) for [256, 128]", fp8flow.quantize_rows, x.T)
    refused("x is a list, want a tensor", fp8flow.quantize_rows, [1.0])
    refused("layout is 'rows', want vec128 or vec128_wire", fp8flow.quantize_rows, x, layout="rows")
    refused("scale_format is 'e8m0', want pow2 or fp32", fp8flow.quantize_columns, x, scale_format="e8m0")
    refused(f"128 rows, want the row capacity of the groups, {groups.row_capacity}", fp8flow.quantize_rows, x, groups)
    refused("w is [128, 256], want [any, any, any]", fp8flow.quantize_weight, x)
    refused("x has layout vec128, want Scaled of layout vec128_wire", fp8flow.permute_pad, q, plan)
    refused("x is a Tensor, want Scaled of layout vec128", fp8flow.transpose_fp8, x)
    refused("x.scales is [3, 128], want [2, 128]", fp8flow.transpose_fp8, dataclasses.replace(q, scales=q.scales.new_zeros(3, 128)))
    refused("x is [128, 256], want [200, any]", fp8flow.permute_pad, x, plan)
    refused("probs is [200, 1], want [200, 2]", fp8flow.make_plan, routed.ids, routed.probs[:, :1].contiguous(), 5)
    refused("-1 experts", fp8flow.make_plan, routed.ids, routed.probs, -1)
    refused("0 experts", fp8flow.make_plan, routed.ids, routed.probs, 0)
    refused("rows is [128, 256]", fp8flow.unpermute, x, plan)
    rows = routed.random_rows(256, device)
    refused("b is [4, 8, 256], want [5, any, 256]", fp8flow.grouped_gemm, rows, rows.new_zeros(4, 8, 256), groups)
    refused("out_dtype is torch.float16", fp8flow.grouped_gemm, rows, rows.new_zeros(5, 8, 256), groups, torch.float16)
    refused("x has layout tile128, want Scaled of layout vec128", fp8flow.grouped_gemm_wgrad, fp8flow.quantize_columns(x),
            fp8flow.transpose_fp8(q), groups)
    refused("h has 128 columns, want a multiple of 256", fp8flow.swiglu_quantize, x[:, :128].contiguous())
    refused("prob is [64], want [128]", fp8flow.swiglu_quantize, x, x.new_zeros(64))
    refused("want cpu or cuda", fp8flow.quantize_rows, torch.empty(1, 128, device="meta"))


def test_library_errors_have_text(device):
    """A contradiction that only the library sees."""
    routed = Routed(device)
    x = routed.random_rows(128, device)
    groups = dataclasses.replace(routed.plan.groups, alignment=64)
    with pytest.raises(fp8flow.Error, match="multiples of 128, not 64") as caught:
        fp8flow.quantize_columns(x, groups)
    assert caught.value.status == 70
