# SPDX-License-Identifier: MIT
"""One MoE layer as a torch.nn.Module with gradients: router, dispatch, experts in the recipe's precision, combine; on one device."""
import ctypes
import itertools
import threading
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .library import DTYPES, LIBRARY, CLayerSpec, CWeights, call, context_of, current, int64, pointer, run

RECIPES = ("bf16", "fp8_tensorwise", "fp8_blockwise", "fp8_flow", "fp8_rowwise", "mxfp8")
# Blocks of transformers 5 with this layer's mathematics: softmax, top-k, experts of silu(gate) * up; and where top-k's probabilities are
# not normalised again, the attribute of the router that says so.
HF_BLOCKS = {"Qwen3MoeSparseMoeBlock": "norm_topk_prob", "OlmoeSparseMoeBlock": "norm_topk_prob", "MixtralSparseMoeBlock": None}


tickets = itertools.count(1)
one_call = threading.Lock()  # of two threads with one layer, no forward comes between a call and what it is checked by
optimizer_steps = 0  # of all optimizers: fused ones change parameters without their version counters


def _count_step(*_):
    global optimizer_steps
    optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


class MoELayer(torch.nn.Module):
    """y = sum over the top-k experts of probability * w2 (silu(gate) * up), [gate, up] = w1 x; x [..., hidden_size], y as x.

    gate.weight [E, H], experts.gate_up_proj [E, 2F, H] (gate rows, then up rows) and experts.down_proj [E, H, F] are parameters, float32
    or bfloat16, all of one dtype; names and shapes are those of transformers' blocks. Rows are bfloat16 inside. The layer makes the copies
    that its GEMMs read whenever a parameter may have changed: after a step of any torch optimizer, or where its tensor, address or version
    counter is new; after a change through `.data` call `weights_changed()`. It keeps what the last forward saved: a backward belongs to
    the last forward.
    hidden_size and ffn_hidden_size are multiples of 128. max_tokens: tokens of the largest call, 0: grown as they come.
    """

    def __init__(self, hidden_size, ffn_hidden_size, num_experts, topk, recipe="fp8_flow", pre_softmax=False, topk_scaling=1.0,
                 max_tokens=0, device=None, dtype=torch.bfloat16):
        super().__init__()

        def weight(*shape):
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02))

        gate, experts = torch.nn.Module(), torch.nn.Module()
        gate.weight = weight(num_experts, hidden_size)
        experts.gate_up_proj = weight(num_experts, 2 * ffn_hidden_size, hidden_size)
        experts.down_proj = weight(num_experts, hidden_size, ffn_hidden_size)
        self._set({"gate": gate, "experts": experts}, topk, recipe, pre_softmax, topk_scaling, max_tokens)

    def _set(self, children, topk, recipe, pre_softmax, topk_scaling, max_tokens):
        if recipe not in RECIPES:
            raise ValueError(f"recipe is {recipe!r}, want {', '.join(RECIPES)}")
        for name, child in children.items():
            self.add_module(name, child)
        self.topk, self.recipe, self.pre_softmax, self.topk_scaling = topk, recipe, pre_softmax, topk_scaling
        self.max_tokens = max_tokens
        self._native = None

    @classmethod
    def from_hf(cls, block, recipe="fp8_flow", max_tokens=0):
        """Takes the place of a MoE block of transformers 5 (Qwen3-MoE, OLMoE, Mixtral). The parameters are the block's own, so optimizers,
        checkpoints and names stay as they are."""
        name = type(block).__name__
        if name not in HF_BLOCKS:
            raise ValueError(f"block is a {name}, want {', '.join(HF_BLOCKS)}")
        gate, experts = block.gate, block.experts
        if not isinstance(getattr(experts, "gate_up_proj", None), torch.nn.Parameter):
            raise ValueError(f"the experts of {name} have no parameter gate_up_proj: want transformers 5")
        act = type(experts.act_fn).__name__
        if act not in ("SiLU", "SiLUActivation"):
            raise ValueError(f"the experts of {name} use {act}, want SiLU")
        if getattr(block, "jitter_noise", 0):
            raise ValueError(f"router_jitter_noise is {block.jitter_noise}, want 0")
        attribute = HF_BLOCKS[name]
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        pre_softmax = attribute is not None and not getattr(gate, attribute)
        layer._set(dict(block.named_children()), gate.top_k, recipe, pre_softmax, 1.0, max_tokens)
        layer.train(block.training)
        return layer

    def extra_repr(self):
        experts, hidden = self.gate.weight.shape
        return f"hidden_size={hidden}, num_experts={experts}, topk={self.topk}, recipe={self.recipe}"

    def weights_changed(self):
        """The next forward makes the copies of the weights again."""
        if self._native is not None:
            self._native.versions = None

    def forward(self, x):
        weights = (self.gate.weight, self.experts.gate_up_proj, self.experts.down_proj)
        hidden, device, dtype = weights[0].shape[1], weights[0].device, weights[0].dtype
        if x.shape[-1] != hidden or not x.is_floating_point() or x.device != device:
            raise ValueError(f"x is {x.dtype} {list(x.shape)} on {x.device}, want [..., {hidden}] of a float dtype on {device}")
        if dtype not in (torch.float32, torch.bfloat16) or any(w.dtype != dtype or w.device != device for w in weights):
            raise ValueError("weights are " + ", ".join(f"{w.dtype} on {w.device}" for w in weights)
                             + ": want one device, and float32 or bfloat16 for all")
        rows = x.reshape(-1, hidden).to(torch.bfloat16).contiguous()
        if self.gate._forward_hooks:  # transformers takes output_router_logits from there, for its balancing loss
            self.gate(x.reshape(-1, hidden).to(dtype))
        return _Run.apply(self, rows, *weights).to(x.dtype).reshape(x.shape)

    def _ready(self, tokens, weights):
        """The native layer for up to `tokens` tokens, with copies of the current weights."""
        if self._native is None or not self._native.fits(self, tokens, weights):
            known = self.max_tokens if self._native is None else max(self.max_tokens, self._native.max_tokens)
            self._native = None  # gives its memory back first
            self._native = _Native(self, max(tokens, known, 1), weights)
        self._native.take(weights)
        return self._native

    def __getstate__(self):  # copies and pickles make a native layer of their own
        return {**self.__dict__, "_native": None}


class _Native:
    """A fp8flow_layer; `ticket`: of its last forward."""

    def __init__(self, module, max_tokens, weights):
        (experts, hidden), (_, _, width) = weights[0].shape, weights[2].shape
        if weights[1].shape != (experts, 2 * width, hidden) or weights[2].shape[:2] != (experts, hidden):
            raise ValueError("weights are " + ", ".join(str(list(w.shape)) for w in weights) + ", want [E, H], [E, 2F, H], [E, H, F]")
        self.device, self.dtype, self.max_tokens = weights[0].device, weights[0].dtype, max_tokens
        self.shapes, self.settings = [w.shape for w in weights], self._settings_of(module)
        self.versions, self.ticket = None, 0
        spec = CLayerSpec(hidden, width, experts, module.topk, max_tokens, module.recipe.encode(),
                          module.topk_scaling, module.pre_softmax, DTYPES[self.dtype])
        self.handle = pointer()
        context = context_of(self.device)
        with current(self.device):
            run("layer_create", context, ctypes.byref(spec), ctypes.byref(self.handle))
        weakref.finalize(self, _destroy, self.handle, self.device)

    @staticmethod
    def _settings_of(module):
        return module.topk, module.recipe, module.pre_softmax, module.topk_scaling

    def fits(self, module, tokens, weights):
        return (tokens <= self.max_tokens and weights[0].device == self.device and weights[0].dtype == self.dtype
                and [w.shape for w in weights] == self.shapes and self._settings_of(module) == self.settings)

    def take(self, weights):
        # inference tensors have no version counter, and another tensor may come to lie at the address of one that is gone
        versions = [optimizer_steps, *((w.data_ptr(), object() if w.is_inference() else w._version) for w in weights)]
        if versions != self.versions or any(ref() is not w for ref, w in zip(self.copied, weights)):
            kept = [w.detach().contiguous() for w in weights]
            call("layer_set_weights", self.device, self.handle, ctypes.byref(CWeights(*[w.data_ptr() for w in kept])))
            self.versions, self.copied = versions, [weakref.ref(w) for w in weights]

    def forward(self, x, y):
        call("layer_forward", self.device, self.handle, pointer(x.data_ptr()), pointer(y.data_ptr()), int64(len(x)))
        self.ticket = next(tickets)
        return self.ticket

    def backward(self, dy, dx, gradients):
        call("layer_backward", self.device, self.handle, pointer(dy.data_ptr()), pointer(dx.data_ptr()),
             ctypes.byref(CWeights(*[g.data_ptr() for g in gradients])))


def _destroy(handle, device):
    with current(device):
        LIBRARY.fp8flow_layer_destroy(handle)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x, *weights):
        y = torch.empty_like(x)
        with one_call:
            ticket = module._ready(len(x), weights).forward(x, y)
        ctx.module = module
        # the layer reads x again; where checkpointing repeats the forward, both are that one's
        ctx.save_for_backward(x, torch.tensor(ticket))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, ticket = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        with one_call:
            native = ctx.module._native
            if native is None or int(ticket) != native.ticket:
                raise RuntimeError("backward of a forward that another one of this MoELayer has followed: it keeps the last one's rows")
            router, w1, w2 = (torch.empty(shape, dtype=dtype, device=native.device)
                              for shape, dtype in zip(native.shapes, (torch.float32, native.dtype, native.dtype)))
            native.backward(dy, dx, (router, w1, w2))
        return None, dx, router.to(native.dtype), w1, w2
