#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains a tiny Qwen3-MoE of the transformers package twice on the same text: as it is, and with its MoE blocks replaced by fp8flow.MoELayer.
Prints both losses side by side. The model is built from a configuration, and the text is this folder's own: nothing is downloaded. On a GPU
where there is one, otherwise on the CPU.

  pip install ./python transformers
  examples/pytorch/train_qwen3_moe.py [--steps 60] [--recipe fp8_flow] [--device cpu]
Exit status 0 if both losses fall and end within 5 % of each other.
"""
import argparse
import pathlib
import sys

import torch
import transformers

import fp8flow


def tiny_model():
    torch.manual_seed(1)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=128, max_position_embeddings=128, norm_topk_prob=True, tie_word_embeddings=False))


def replace_moe_blocks(model, recipe):
    """Every MoE block of the model becomes a MoELayer that has its parameters; returns how many."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()
             if type(child).__name__ in fp8flow.moe_layer.HF_BLOCKS]
    for parent, name, block in found:
        setattr(parent, name, fp8flow.MoELayer.from_hf(block, recipe=recipe))
    return len(found)


def batches(steps, device, sequences=8, length=64):
    """The same windows of bytes for both models."""
    folder = pathlib.Path(__file__).resolve().parent
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (sequences,), generator=generator)
        yield torch.stack([tokens[start:start + length] for start in starts.tolist()]).to(device)


def train(model, steps, device):
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in batches(steps, device):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--recipe", default="fp8_flow")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    plain, replaced = tiny_model(), tiny_model()
    count = replace_moe_blocks(replaced, options.recipe)
    print(f"{count} MoE blocks replaced, recipe {options.recipe}, on {options.device}")
    print("step   transformers   fp8flow   difference")
    losses = []
    for step, pair in enumerate(zip(*[train(model, options.steps, options.device) for model in (plain, replaced)])):
        losses.append(pair)
        if step % 10 == 0 or step == options.steps - 1:
            print(f"{step:4d}   {pair[0]:12.4f}   {pair[1]:7.4f}   {(pair[1] / pair[0] - 1) * 100:+9.2f} %", flush=True)
    (first, _), (last, ours) = losses[0], losses[-1]
    return 0 if last < first and abs(ours / last - 1) < 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
