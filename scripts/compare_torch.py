#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares `fp8flow replay` with the MoE blocks of the transformers package: of every family that --hf-config reads, run in float64 with the
same weights; output, routing, input gradient and every weight gradient. The files go through the safetensors package both ways, and
config.json is the one that transformers writes. Needs torch, transformers and safetensors.

  scripts/compare_torch.py                                       every family under bf16, fp8_blockwise and fp8_flow
  scripts/compare_torch.py --families olmoe,minimax_m2           some of them
  scripts/compare_torch.py --fp8flow build/cuda-release/fp8flow --device cuda --ranks 2
The rows "torch bf16" are the same blocks in BF16 on --device: what PyTorch itself loses. (DeepSeek-V3's router works in float32 whatever the
block's type, so its gradients have float32's error.)
Exit status 0 if every error is below its bound, 1 if not, 77 where a package is missing.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile

import compare_layer as layer

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    missing = None
except ImportError as error:
    missing = error

NO_GROUPS = {"n_group": 1, "topk_group": 1}
# family: (its configuration, its block, the layer of compare_layer.py whose fields it has, and what differs)
FAMILIES = {"deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE", "deepseek_v3", {}),
            "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", "qwen3_moe", {}),
            "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock", "mixtral", {}),
            # no class of transformers: its own is DeepSeek-V3's
            "kimi_k2": ("DeepseekV3Config", "DeepseekV3MoE", "deepseek_v3", NO_GROUPS | {"routed_scaling_factor": 2.827}),
            "glm4_moe": ("Glm4MoeConfig", "Glm4MoeMoE", "deepseek_v3", NO_GROUPS),
            "glm4_moe_as_it_is": ("Glm4MoeConfig", "Glm4MoeMoE", "deepseek_v3", NO_GROUPS | {"norm_topk_prob": False}),
            "deepseek_v2": ("DeepseekV2Config", "DeepseekV2Moe", "deepseek_v3",
                            NO_GROUPS | {"topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0}),
            "olmoe": ("OlmoeConfig", "OlmoeSparseMoeBlock", "mixtral", {"norm_topk_prob": False}),
            "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2SparseMoeBlock", "mixtral", {})}


def block_of(family, dtype):
    """A block with random weights that BF16 holds exactly, and its configuration. Newer and older versions of transformers differ in how
    they name and join the experts' weights; this takes the block's own parameters, whatever they are called."""
    config_name, block_name, base, own = FAMILIES[family]
    fields = layer.config_of(base)
    for name in ("model_type", "rope_theta", "scoring_func", "topk_method"):  # the class's own
        fields.pop(name, None)
    config = getattr(transformers, config_name)(**fields | own)
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    config._experts_implementation = "eager"  # one expert after the other, in the block's own type
    block = getattr(module, block_name)(config).to(dtype)
    with torch.no_grad():
        for name, value in list(block.named_parameters()) + list(block.named_buffers()):
            std = 0.1 if name == "gate.weight" else 0.05 if "bias" in name else value.shape[-1] ** -0.5
            value.copy_((std * torch.randn(value.shape)).bfloat16())
    return block.train(), config


def run(block, x, dy):
    """What replay writes, of the block's own forward and backward."""
    for p in block.parameters():
        p.grad = None
    dtype = next(block.parameters()).dtype
    x = x.to(next(block.parameters()).device, dtype).requires_grad_()
    seen = {}
    hook = block.gate.register_forward_hook(lambda _module, _inputs, output: seen.update(gate=output))
    y = block(x[None])
    hook.remove()
    y = (y[0] if isinstance(y, tuple) else y).view_as(x)
    y.backward(dy.to(y))
    gate = seen["gate"]
    if not isinstance(gate, tuple) or len(gate) != 3:
        sys.exit(f"{type(block).__name__}: its gate gives no (logits, weights, ids) in transformers {transformers.__version__}; 5.x is wanted")
    results = {"output": y.detach(), "topk_weights": gate[1].detach(), "topk_ids": gate[2], "grad_hidden_states": x.grad}
    grads = {"mlp." + name: p.grad for name, p in block.named_parameters()}
    # copies: `block.to` changes gradients in place
    return {n: t.double().cpu() for n, t in results.items()}, {n: t.detach().cpu().to(torch.float64, copy=True) for n, t in grads.items()}


def split(grads):
    """Joined experts' gradients expert by expert, under the names that replay gives on several ranks; others as they are."""
    out = {}
    for name, value in grads.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e in range(len(value)):
                out[f"{prefix}.{e}.gate_proj.weight"], out[f"{prefix}.{e}.up_proj.weight"] = value[e].chunk(2)
        elif last == "down_proj":
            out.update({f"{prefix}.{e}.down_proj.weight": value[e] for e in range(len(value))})
        else:
            out[name] = value
    return out


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def errors(got, got_grads, want, want_grads):
    """(tokens routed alike, largest error of a weight, [output, d hidden, worst d expert, d router])"""
    got_grads, want_grads = split(got_grads), split(want_grads)
    if set(got_grads) != set(want_grads):
        sys.exit(f"gradients differ in names: {sorted(set(got_grads) ^ set(want_grads))}")
    ids, order = want["topk_ids"].sort(1)  # transformers does not sort the chosen by weight
    got_ids, got_order = got["topk_ids"].sort(1)
    same = (ids == got_ids).all(1)
    weights = (want["topk_weights"].gather(1, order) - got["topk_weights"].double().gather(1, got_order)).abs().max().item()
    router = "mlp.gate.weight"
    return same, weights, [error(got["output"], want["output"]), error(got["grad_hidden_states"], want["grad_hidden_states"]),
                           max(error(got_grads[n], want_grads[n]) for n in want_grads if n != router),
                           error(got_grads[router], want_grads[router])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8flow", default=f"{layer.ROOT}/build/cpu/fp8flow", help="the program")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--recipes", default="bf16,fp8_blockwise,fp8_flow")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu", help="of PyTorch's BF16 block; the float64 one runs on the CPU")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.norm = options.stages = False
    if missing:
        print(f"skipped: {missing}")
        return 77
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()  # of token ids beyond the small vocabulary
    failed = False
    print(f"norm-wise errors against transformers {transformers.__version__} in float64 (torch {torch.__version__}); {layer.T} tokens, hidden "
          f"{layer.H}, {layer.E} experts of width {layer.F}, top-{layer.K}, {options.ranks} rank(s)")
    print(f"{'family':<17} {'arm':<14} {'routing':>8} {'weights':>9} {'output':>9} {'d hidden':>9} {'d experts':>9} {'d router':>9}")
    for family in options.families.split(","):
        torch.manual_seed(options.seed)
        try:
            block, config = block_of(family, torch.float64)
        except (ImportError, AttributeError, TypeError) as problem:
            print(f"{family}: not in transformers {transformers.__version__} as this script knows it: {problem}")
            return 1
        x, dy = torch.randn(layer.T, layer.H).bfloat16(), torch.randn(layer.T, layer.H).bfloat16()
        want, want_grads = run(block, x, dy)

        def report(arm, got, grads):
            same, weights, all_errors = errors(got, grads, want, want_grads)
            print(f"{family:<17} {arm:<14} {same.sum():>4}/{layer.T:<3} {weights:9.1e} " + " ".join(f"{e:9.1e}" for e in all_errors))
            return same.all() and weights < layer.BOUND_WEIGHTS, all_errors

        with tempfile.TemporaryDirectory() as folder:
            state = {"mlp." + name: (value.float() if "bias" in name else value.bfloat16()).contiguous()
                     for name, value in block.state_dict().items()}
            save_file(state | {"hidden_states": x, "grad_output": dy}, f"{folder}/layer.safetensors")
            with open(f"{folder}/config.json", "w") as file:
                json.dump(json.loads(config.to_json_string()) | ({"model_type": family} if family == "kimi_k2" else {}), file)
            report("torch bf16", *run(block.to(options.device, torch.bfloat16), x, dy))
            for recipe in options.recipes.split(","):
                layer.replay(options, recipe, folder)
                out, grads = f"{folder}/{recipe}", {}
                for name in os.listdir(f"{out}/gradients"):
                    if name.endswith(".safetensors"):
                        grads.update(load_file(f"{out}/gradients/{name}"))
                routed, all_errors = report(recipe, load_file(f"{out}/replay.safetensors"), grads)
                bounds = layer.BOUNDS.get(recipe, layer.BOUNDS[None])
                failed |= not routed or any(e > bound for e, bound in zip(all_errors, bounds))
    print("above a bound" if failed else "all within their bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
