# SPDX-License-Identifier: MIT
"""PyTorch in FP64 and with E4M3 operands, for compare_torch.py: modes that change what a model of transformers calls."""

import torch
from torch.overrides import TorchFunctionMode


class Fp64(TorchFunctionMode):
    """What transformers computes in FP32 whatever the type of a model, in FP64: norms, softmax, routers, rotary angles."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, names = ([torch.float64 if v is torch.float32 else v for v in of] for of in (args, (kwargs or {}).values()))
        return func(*args, **dict(zip(kwargs or {}, names)))


def e4m3(value, height):
    """value as E4M3 with a power of two as scale of height x 128 values."""
    rows, columns = value.shape
    tiles = torch.nn.functional.pad(value.double(), (0, -columns % 128, 0, -rows % height))
    tiles = tiles.unflatten(1, (-1, 128)).unflatten(0, (-1, height))
    scale = 2 ** (tiles.abs().amax((1, 3), keepdim=True) / 448).clamp_min(1e-30).log2().ceil()
    return ((tiles / scale).to(torch.float8_e4m3fn).double() * scale).flatten(2).flatten(0, 1)[:rows, :columns]


class E4m3Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.dtype, xq, wq = x.dtype, e4m3(x, 1), e4m3(weight, 128)
        ctx.save_for_backward(xq, wq)
        return (xq @ wq.T).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (xq, wq), dyq = ctx.saved_tensors, e4m3(dy, 1)
        return (dyq @ wq).to(ctx.dtype), (dyq.T @ xq).to(ctx.dtype)


class E4m3(TorchFunctionMode):
    """Linear layers of these weights, or of parts of them, read inputs, weights and output gradients as FP8 recipes do."""

    def __init__(self, weights):
        super().__init__()
        self.weights = {id(weight) for weight in weights}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear and {id(args[1]), id(args[1]._base)} & self.weights:
            rows = E4m3Linear.apply(args[0].flatten(0, -2), args[1])
            return rows.unflatten(0, args[0].shape[:-1])
        return func(*args, **(kwargs or {}))
