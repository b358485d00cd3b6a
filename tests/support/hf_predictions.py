#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Small Hugging Face models made by a formula, and tokens: OUT/FAMILY and OUT/stream.bin, .idx. Numbers that BF16 holds.

With --expect prints what transformers computes with them (needs torch and transformers): the loss of the stream's second
half in windows of 32, and the greedy tokens after its first 8, in BF16, with the smallest gap of the two largest logits.
Usage: hf_predictions.py OUT [--expect]
"""

import array
import json
import os
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/scripts")
import preprocess_data

HIDDEN, WIDTH, EXPERTS, LAYERS, VOCAB, HEADS, DIM, SEQ, PROMPT, COUNT = 128, 128, 4, 2, 64, 4, 32, 32, 8, 64
TOKENS = [(7 * i + i * i // 5) % VOCAB for i in range(321)]


def tensors(family):
    """name -> (shape, scale); a scale of 0: a gain near 1."""
    experts = {"qwen3_moe": ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
               "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
                           "block_sparse_moe.experts.{}.w2")}[family]
    table = {"model.embed_tokens.weight": ((VOCAB, HIDDEN), 1), "model.norm.weight": ((HIDDEN,), 0),
             "lm_head.weight": ((VOCAB, HIDDEN), 1 / 8)}
    for layer in range(LAYERS):
        names = {"input_layernorm": ((HIDDEN,), 0), "post_attention_layernorm": ((HIDDEN,), 0),
                 "self_attn.q_proj": ((HEADS * DIM, HIDDEN), 1 / 4), "self_attn.k_proj": ((HEADS // 2 * DIM, HIDDEN), 1 / 4),
                 "self_attn.v_proj": ((HEADS // 2 * DIM, HIDDEN), 1 / 4), "self_attn.o_proj": ((HIDDEN, HEADS * DIM), 1 / 8),
                 experts[0]: ((EXPERTS, HIDDEN), 1)}
        if family == "qwen3_moe":
            names.update({"self_attn.q_norm": ((DIM,), 0), "self_attn.k_norm": ((DIM,), 0)})
        for e in range(EXPERTS):
            names.update({experts[1].format(e): ((WIDTH, HIDDEN), 1 / 4), experts[2].format(e): ((WIDTH, HIDDEN), 1 / 4),
                          experts[3].format(e): ((HIDDEN, WIDTH), 1 / 8)})
        table.update({f"model.layers.{layer}.{name}.weight": value for name, value in names.items()})
    return table


def values(name, shape, scale, seed):
    """128 levels in [-scale, scale), without a pattern."""
    count, state = shape[0] * (shape[1] if len(shape) > 1 else 1), sum(name.encode()) * 7919 + len(name) + (seed << 32)
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        level = (state >> 40) % 128 / 64 - 1
        yield level * scale if scale else 1 + level / 4


def weights(name, shape, scale, seed):
    """The head also has a quarter of the embedding of another token, so that one token is expected after each."""
    own = list(values(name, shape, scale, seed))
    if name == "lm_head.weight":
        embedding = list(values("model.embed_tokens.weight", shape, 1, seed))
        own = [value + embedding[(5 * (i // HIDDEN) + 3) % VOCAB * HIDDEN + i % HIDDEN] / 4 for i, value in enumerate(own)]
    return own


def bf16(value):
    return struct.pack("<f", value)[2:]


def write_model(folder, family, seed):
    os.makedirs(folder, exist_ok=True)
    config = {"model_type": family, "architectures": [{"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}[family] + "ForCausalLM"],
              "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "hidden_act": "silu",
              "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "head_dim": DIM, "num_experts_per_tok": 2,
              "max_position_embeddings": 256, "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    config.update({"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "intermediate_size": 256, "norm_topk_prob": True,
                   "decoder_sparse_step": 1, "mlp_only_layers": []} if family == "qwen3_moe" else
                  {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "sliding_window": None})
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (shape, scale) in tensors(family).items():
        part = b"".join(map(bf16, weights(name, shape, scale, seed)))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def expect(folder):
    import torch
    import transformers
    torch.set_grad_enabled(False)
    load = transformers.AutoModelForCausalLM.from_pretrained
    held_out = torch.tensor(TOKENS[len(TOKENS) // 2:])
    windows = (len(held_out) - 1) // SEQ * SEQ
    logits = load(folder, dtype=torch.float32)(held_out[:windows].reshape(-1, SEQ)).logits.flatten(0, 1)
    targets = held_out[1:windows + 1]
    print(f"{folder}: loss {torch.nn.functional.cross_entropy(logits, targets):.6f}, "
          f"right {(logits.argmax(-1) == targets).sum()} of {windows}")
    model, tokens, gap = load(folder, dtype=torch.bfloat16), TOKENS[:PROMPT], 1e9
    for _ in range(COUNT):
        best = model(torch.tensor([tokens])).logits[0, -1].float().topk(2)
        gap = min(gap, (best.values[0] - best.values[1]).item())
        tokens = tokens + [best.indices[0].item()]
    print(f"  smallest gap {gap:.3f}, prompt {TOKENS[:PROMPT]}, tokens {','.join(map(str, tokens[PROMPT:]))}")


def main():
    out = sys.argv[1]
    for family, seed in (("qwen3_moe", 47), ("mixtral", 15)):  # seeds: the tokens of qwen3_moe are not decided by rounding
        write_model(f"{out}/{family}", family, seed)
        if "--expect" in sys.argv:
            expect(f"{out}/{family}")
    with open(f"{out}/stream.bin", "wb") as file:
        array.array("i", TOKENS).tofile(file)
    half = len(TOKENS) // 2
    preprocess_data.write_index(f"{out}/stream.idx", "i", array.array("i", [half, len(TOKENS) - half]))


if __name__ == "__main__":
    main()
