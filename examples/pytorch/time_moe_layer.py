#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times forward + backward of one fp8flow.MoELayer on a GPU, with balanced routing as `fp8flow profile` forces it, and compares with a
profile.json of the same layer. Defaults: Qwen3-30B-A3B.

  fp8flow profile configs/layer_qwen3_30b_a3b.yaml --recipes fp8_flow --set parallel.expert_model_parallel_size=1 \\
      --set training.global_batch_size=1 --set profile.energy_seconds=0 --out runs/pytorch --overwrite
  examples/pytorch/time_moe_layer.py --profile runs/pytorch/profile.json
The profile's layer has an RMSNorm in front, which also makes the FP8 rows; here the layer casts its input.
"""
import argparse
import json
import statistics

import torch

import fp8flow


def balanced_input(layer, tokens):
    """Rows that the router sends to the experts one after the other: it reads the logits from the first columns."""
    experts, hidden = layer.gate.weight.shape
    with torch.no_grad():
        layer.gate.weight.zero_()[:, :experts].fill_diagonal_(1)
    x = torch.randn(tokens, hidden, device=layer.gate.weight.device)
    choice = torch.arange(tokens * layer.topk, device=x.device).reshape(tokens, layer.topk) % experts
    x[:, :experts] = x[:, :experts].clamp(-1, 1).scatter_add(1, choice, torch.full(choice.shape, 4.0, device=x.device))
    return x.bfloat16().requires_grad_()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 2048), ("ffn", 768), ("experts", 128), ("topk", 8), ("tokens", 4096), ("warm", 20), ("steps", 40)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--recipe", default="fp8_flow")
    parser.add_argument("--profile", help="profile.json to compare with")
    o = parser.parse_args()

    layer = fp8flow.MoELayer(o.hidden, o.ffn, o.experts, o.topk, recipe=o.recipe, device="cuda", dtype=torch.float32, max_tokens=o.tokens)
    x = balanced_input(layer, o.tokens)
    dy = torch.randn_like(x)
    times = []
    for step in range(o.warm + o.steps):
        x.grad = None
        layer.zero_grad()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        layer(x).backward(dy)
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    measured = [begin.elapsed_time(end) for begin, end in times[o.warm:]]
    ours = statistics.median(measured)
    print(f"{torch.cuda.get_device_name()}, {o.recipe}, {o.tokens} tokens: forward + backward {ours:.3f} ms "
          f"(least {min(measured):.3f}, most {max(measured):.3f}), median of {o.steps}")
    if o.profile:
        with open(o.profile) as file:
            recipe = next(r for r in json.load(file)["recipes"] if r["recipe"] == o.recipe)
        theirs = 1e3 * recipe["layer seconds"]["median"]
        print(f"profile: {theirs:.3f} ms; here {(ours / theirs - 1) * 100:+.1f} %")


if __name__ == "__main__":
    main()
