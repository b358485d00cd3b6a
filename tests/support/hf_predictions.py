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
LATENT, ROPE, DENSE = 64, 16, 200  # of deepseek: both latents, the rotated dimensions, its first layer, no multiple of 128
ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
                 "deepseek_v32": "DeepseekV32ForCausalLM"}
TOKENS = [(7 * i + i * i // 5) % VOCAB for i in range(321)]


def tensors(family):
    """name -> (shape, scale); a scale of 0: a gain near 1."""
    experts = ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
    if family == "mixtral":
        experts = tuple(f"block_sparse_moe.{name}" for name in ("gate", "experts.{}.w1", "experts.{}.w3", "experts.{}.w2"))
    table = {"model.embed_tokens.weight": ((VOCAB, HIDDEN), 1), "model.norm.weight": ((HIDDEN,), 0),
             "lm_head.weight": ((VOCAB, HIDDEN), 1 / 8)}
    for layer in range(LAYERS):
        names = {"input_layernorm": ((HIDDEN,), 0), "post_attention_layernorm": ((HIDDEN,), 0),
                 "self_attn.o_proj": ((HIDDEN, HEADS * DIM), 1 / 8)}
        if family.startswith("deepseek"):
            names.update({"self_attn.q_a_proj": ((LATENT, HIDDEN), 1 / 4), "self_attn.q_a_layernorm": ((LATENT,), 0),
                          "self_attn.q_b_proj": ((HEADS * (DIM + ROPE), LATENT), 1 / 2),
                          "self_attn.kv_a_proj_with_mqa": ((LATENT + ROPE, HIDDEN), 1 / 4),
                          "self_attn.kv_a_layernorm": ((LATENT,), 0), "self_attn.kv_b_proj": ((HEADS * 2 * DIM, LATENT), 1 / 4)})
        else:
            names.update({"self_attn.q_proj": ((HEADS * DIM, HIDDEN), 1 / 4), "self_attn.k_proj": ((HEADS // 2 * DIM, HIDDEN), 1 / 4),
                          "self_attn.v_proj": ((HEADS // 2 * DIM, HIDDEN), 1 / 4)})
        if family == "deepseek_v32":  # its indexer has two heads of DIM
            names.update({"self_attn.indexer.wq_b": ((2 * DIM, LATENT), 1 / 4), "self_attn.indexer.wk": ((DIM, HIDDEN), 1 / 4),
                          "self_attn.indexer.k_norm": ((DIM,), 0), "self_attn.indexer.weights_proj": ((2, HIDDEN), 1 / 4)})
            table[f"model.layers.{layer}.self_attn.indexer.k_norm.bias"] = (DIM,), 1 / 8
        if family == "qwen3_moe":
            names.update({"self_attn.q_norm": ((DIM,), 0), "self_attn.k_norm": ((DIM,), 0)})
        ffns = [([name.format(e) for name in experts[1:]], WIDTH) for e in range(EXPERTS)]
        if family.startswith("deepseek"):  # the first layer is dense, the second has a shared expert
            of_all = [f"mlp.{'shared_experts.' if layer else ''}{name}_proj" for name in ("gate", "up", "down")]
            ffns = [*ffns, (of_all, WIDTH)] if layer else [(of_all, DENSE)]
        if len(ffns) > 1:
            names[experts[0]] = ((EXPERTS, HIDDEN), 1)
        for (gate, up, down), width in ffns:
            names.update({gate: ((width, HIDDEN), 1 / 4), up: ((width, HIDDEN), 1 / 4), down: ((HIDDEN, width), 1 / 8)})
        table.update({f"model.layers.{layer}.{name}.weight": value for name, value in names.items()})
    if family.startswith("deepseek"):
        table["model.layers.1.mlp.gate.e_score_correction_bias"] = (EXPERTS,), 1 / 8
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
    config = {"model_type": family, "architectures": [ARCHITECTURES[family]],
              "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "hidden_act": "silu",
              "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "head_dim": DIM, "num_experts_per_tok": 2,
              "max_position_embeddings": 256, "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    deepseek = {"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH, "intermediate_size": DENSE, "n_shared_experts": 1,
                "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": LATENT, "kv_lora_rank": LATENT,
                "qk_nope_head_dim": DIM, "qk_rope_head_dim": ROPE, "v_head_dim": DIM, "num_key_value_heads": HEADS}
    config.update({
        "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "intermediate_size": 256, "norm_topk_prob": True,
                      "decoder_sparse_step": 1, "mlp_only_layers": []},
        "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "sliding_window": None},
        "deepseek_v3": deepseek,
        "deepseek_v32": {**deepseek, "index_topk": 2048, "index_n_heads": 2, "index_head_dim": DIM}}[family])
    if family.startswith("deepseek"):
        del config["head_dim"]
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
    for family, seed in (("qwen3_moe", 47), ("mixtral", 15), ("deepseek_v3", 2), ("deepseek_v32", 2)):  # seeds: the tokens of qwen3_moe are not decided by rounding
        write_model(f"{out}/{family}", family, seed)
        if "--expect" in sys.argv:
            expect(f"{out}/{family}")
    with open(f"{out}/stream.bin", "wb") as file:
        array.array("i", TOKENS).tofile(file)
    half = len(TOKENS) // 2
    preprocess_data.write_index(f"{out}/stream.idx", "i", array.array("i", [half, len(TOKENS) - half]))


if __name__ == "__main__":
    main()
