#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares fp8flow with the transformers package, from the same weights. Needs torch, transformers and safetensors.

layer: `fp8flow replay` with the MoE block of every family that `fp8flow families` lists, from files that transformers
  writes of a small random model, against the block in float64: output, input gradient and every weight gradient, which
  replay writes under the names of the files. The rows "torch bf16" are the same blocks in BF16 on --device: what
  PyTorch itself loses.
training: `fp8flow train` with a small model of every whole family against the same model in PyTorch in float64, on the
  same tokens (--dump-samples): the loss of every step, and every gradient of the first. AdamW, schedule, weight decay (none on
  norms and biases) and clipping follow the same rules. The noise floor is PyTorch in BF16, for FP8 recipes with E4M3 experts.
  Gradients of the first step are compared twice: with the model's top-k, and with every token at every expert, where
  rounding sends no token to another expert. Qwen3-MoE and Mixtral also train with Megatron's balancing loss.
predictions: the same models after --steps of `fp8flow train`, exported, in transformers and in `fp8flow evaluate` and
  `generate`: the loss of the same windows, and 64 greedy tokens in BF16. Every second window of the data repeats one text,
  and the greedy tokens continue it: their logits are no ties, which random data has.

fixtures: writes tests/data/families, which tests/cli/families_test.cpp compares replay with, and which keys of other
  families each class reads ("reads" of tests/data/hf_families.json).

  scripts/compare_torch.py layer                                 every family under bf16, fp8_blockwise and fp8_flow
  scripts/compare_torch.py layer --families olmoe --ranks 2
  scripts/compare_torch.py training --steps 20 --families mixtral
  scripts/compare_torch.py predictions --steps 40
Long because the four commands share small models of every family.
Exit status: 0 if every error is below its bound (training: --bound times PyTorch's own, and 8e-2; predictions: a loss
within 7e-4 nats, and the same tokens until two logits are at most twice BF16's error apart), 1 if not, 77 without a
package.
"""

import array
import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import re
import statistics
import sys
import tempfile

import compare_layer
import jobs
import preprocess_data
from jobs import ROOT, write_json

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # of PyTorch's threads, where others use the cores
try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from torch_precision import E4m3, Fp64
    from transformers import AutoConfig
    missing = None
except ImportError as problem:
    missing = problem


def error(got, want):
    return compare_layer.error(got.double().numpy(), want.double().numpy())


# ---- layer
# Tokens: a router's gradient has one number per token and expert. With 96 tokens E4M3's error of it is 5.0e-2 to 1.04e-1 over
# 24 seeds of kimi_k2 (mean 6.6e-2, deviation 1.1e-2), with 768 tokens 6.1e-2 to 7.2e-2.
T, H = 768, compare_layer.H
TARGETS = {"bf16": 4.5e-3, None: 8e-2}  # norm-wise error of every tensor
# Sizes under the names of all families; a class takes those that it has.
SMALL = dict(
    hidden_size=H, d_model=H, num_hidden_layers=4, n_layers=4, vocab_size=256, num_attention_heads=4, n_heads=4,
    num_key_value_heads=2, head_dim=32, intermediate_size=256, moe_intermediate_size=128, prefix_dense_intermediate_size=256,
    n_routed_experts=8, num_experts=8, num_local_experts=8, num_experts_per_tok=2, num_experts_per_token=2, moe_topk=2,
    n_shared_experts=1, num_shared_experts=1, shared_expert_intermediate_size=128, shared_intermediate_size=128,
    shared_experts_intermediate_size=128, first_k_dense_replace=1, num_dense_layers=1, mlp_only_layers=[0],
    max_position_embeddings=256, q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
    index_topk=2048, index_head_dim=32, index_n_heads=2, gated_norm_rank=16, linear_head_dim=32, linear_num_heads=4,
    linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, mamba_n_heads=4,
    mamba_d_head=128, mamba_d_state=16, mamba_dt_rank=8, use_mamba_kernels=False, attn_layer_offset=1, attn_layer_period=2,
    swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=32, swa_v_head_dim=32,
    pad_token_id=0, bos_token_id=1, eos_token_id=2)
LIMIT = 3.75 + 2**-7  # is exceeded, and lies halfway between two BF16 values, so that rounding moves none across it
# What a family needs besides, or is compared with besides its defaults.
OWN = {"kimi_k2": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
       "glm4_moe": {"norm_topk_prob": False},
       "glm5_next": {"qk_rope_head_dim": 0, "swiglu_limit": LIMIT},
       "hy_v4": {"swiglu_limit": LIMIT},
       "minimax_m3_vl": {"swiglu_limit": LIMIT},
       "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
       "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
                "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 8, "moe_top_k": 2}}}
CLASS_OF = {"kimi_k2": "deepseek_v3"}  # no class of transformers: its own is DeepSeek-V3's


def small_config(family, **more):
    """The family's configuration with small sizes; what has no size is as its class has it."""
    base = AutoConfig.for_model(CLASS_OF.get(family, family)).get_text_config()
    base.allow_global_per_layer_attribute_access = True
    fields = {name: value for name, value in SMALL.items() if hasattr(type(base), name) or hasattr(base, name)}
    for groups in ("n_group", "num_expert_group"):
        if (getattr(base, groups, None) or 1) > 1:
            fields |= {groups: 4, "topk_group": 1}
    fields |= OWN.get(family, {}) | more
    if getattr(base, "kv_lora_rank", None):
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    return type(base)(**fields)


def class_of(config):
    """The language model; some have no entry in AutoModelForCausalLM."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    names = [name for name, value in vars(module).items()
             if getattr(value, "config_class", None) is type(config) and value.__module__ == module.__name__]
    return next((getattr(module, name) for ending in ("ForCausalLM", "Model") for name in names
                 if name.endswith(ending) and "PreTrained" not in name), None)


def small_model(family, dtype, **more):
    """With random weights that BF16 holds exactly."""
    config = small_config(family, **more)
    config._experts_implementation = "eager"  # one expert after the other, in the block's own type
    config._attn_implementation = "eager"
    try:
        model = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:
        model = class_of(config)(config)
    with torch.no_grad():
        for name, value in list(model.named_parameters()) + list(model.named_buffers()):
            if not value.is_floating_point() or "rotary" in name or "decay" in name or "slope" in name:
                continue
            router = re.search(r"(gate|router|router\.gate|router\.layer|gate\.wg)\.weight$", name)
            std = 0.1 if router else 0.05 if "bias" in name else value.shape[-1] ** -0.5
            center = 1.0 if value.dim() == 1 and name.endswith("norm.weight") else 0.0
            value.copy_((center + std * torch.randn(value.shape)).bfloat16())
    return model.to(dtype).train()


def save(model, family, folder):
    model.save_pretrained(folder)
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    write_json(f"{folder}/config.json", config | ({"model_type": family} if family in CLASS_OF else {}))


def moe_of(model):
    """The last MoE block, the layer around it, and its number."""
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "experts")]
    name, block = found[-1]
    number = int(re.findall(r"(?:layers|blocks)\.(\d+)\.", name)[-1])
    return block, model.get_submodule(name.rpartition(".")[0]), number


def published(path):
    """Tensors of a file under published names. Transformers saves the shared experts of its text models otherwise: those of
    MiniMax-M3 with gate and up in one, and Hunyuan 4's gate under the name of its attention's."""
    tensors = {}
    for name, value in load_file(path).items():
        if "shared_experts.gate_up_proj" in name:
            for part, half in zip(("gate_proj", "up_proj"), value.chunk(2)):
                tensors[name.replace("gate_up_proj", part)] = half.contiguous()
        else:
            tensors[name.replace("shared_experts.linear_gate", "shared_experts.gate_proj")] = value
    return tensors


def run_block(model, x, dy):
    """Output, input gradient, and the gradients of the block's weights as the files name them."""
    block, layer, _ = moe_of(model)
    block.post_mlp_layernorm = torch.nn.Identity()  # A.X-K1's follows the MoE layer
    model.zero_grad()
    x = x.to(next(block.parameters())).requires_grad_()
    y = block(x[None])
    y = (y[0] if isinstance(y, tuple) else y).view_as(x)
    if hasattr(layer, "shared_mlp"):  # Granite's is next to the block
        y = y + layer.shared_mlp(x)
    y.backward(dy.to(y))
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(gradients.parameters(), model.parameters()):
            p.copy_(torch.zeros_like(p) if q.grad is None else q.grad)
        for buffer in gradients.buffers():
            buffer.zero_()
    with tempfile.TemporaryDirectory() as folder:
        gradients.save_pretrained(folder)
        named = {n: t.double().numpy() for n, t in published(f"{folder}/model.safetensors").items() if t.any()}
    return {"output": y.detach().double().numpy(), "grad_hidden_states": x.grad.double().numpy()}, named


def compare_block(options, family, folder):
    """Row of the report, and whether the errors of fp8flow are within their targets."""
    torch.manual_seed(options.seed)
    model = small_model(family, torch.float64)
    save(copy.deepcopy(model).bfloat16(), family, folder)
    state = published(f"{folder}/model.safetensors")
    save_file({n: t.float() if "bias" in n else t for n, t in state.items()}, f"{folder}/model.safetensors")
    x, dy = torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()
    save_file({"hidden_states": x, "grad_output": dy}, f"{folder}/layer.safetensors")
    want, want_gradients = run_block(model, x, dy)
    row, holds = {"family": family}, True
    for arm in ["torch bf16", *options.recipes.split(",")]:
        if arm == "torch bf16":
            got, gradients = run_block(copy.deepcopy(model).to(options.device, torch.bfloat16), x, dy)
        else:
            got, gradients = compare_layer.replay(
                options, arm, folder, ["--weights", f"{folder}/model.safetensors", "--layer", str(moe_of(model)[2])])
        errors = block_errors(got, gradients, want, want_gradients)
        print(f"{family:<17} {arm:<14} " + " ".join(f"{value:9.1e}" for value in errors.values()), flush=True)
        row[arm] = [float(f"{value:.2e}") for value in errors.values()]
        if arm != "torch bf16":
            holds &= all(e <= TARGETS.get(arm, TARGETS[None]) for e in errors.values())
    return row, holds


ERRORS = ["output", "d hidden", "d experts", "d router"]


def block_errors(got, gradients, want, want_gradients):
    """Norm-wise; that the names of the gradients are those of the file is the round trip of the names."""
    if set(gradients) != set(want_gradients):
        sys.exit(f"gradients differ in names: {sorted(set(gradients) ^ set(want_gradients))[:8]}")
    errors = {True: [0.0], False: [0.0]}
    for name, value in want_gradients.items():
        router = re.search(r"(gate|router|router\.gate|router\.layer|gate\.wg)\.weight$", name) is not None
        parts = zip(gradients[name], value) if value.ndim == 3 else [(gradients[name], value)]
        errors[router] += [compare_layer.error(one, other) for one, other in parts]
    return dict(zip(ERRORS, [*(compare_layer.error(got[name], want[name]) for name in ("output", "grad_hidden_states")),
                             compare_layer.largest(errors[False]), compare_layer.largest(errors[True])]))


def families_of(options):
    """Those that the program reads, or the ones that are asked for."""
    lines = jobs.run([options.fp8flow, "families"]).splitlines()
    known = [line.split()[0] for line in lines if line.split()[1] != "refused"]
    return options.families.split(",") if options.families else known


def layer(options):
    print(f"norm-wise errors against float64; {T} tokens, hidden {H}, {options.ranks} rank(s)\n"
          f"{'family':<17} {'arm':<14} " + " ".join(f"{name:>9}" for name in ERRORS))
    rows, holds, absent = [], True, []
    for family in families_of(options):
        with tempfile.TemporaryDirectory() as folder:
            try:
                small_config(family)
            except (KeyError, ValueError) as problem:
                print(f"{family}: not in transformers {transformers.__version__}: {problem}")
                absent.append(family)
                continue
            row, within = compare_block(options, family, folder)
        rows, holds = [*rows, row], holds and within
    print("all within their bounds" if holds else "above a bound")
    return {"tokens": T, "not compared": absent, "errors": ERRORS, "families": rows}, holds


# ---- fixtures
# Experts in one tensor, transposed, one by one with a bias, clamped.
FIXTURES = {"granitemoeshared": {}, "dbrx": {}, "lfm2_moe": {}, "glm5_next": {"swiglu_limit": 1 + 2**-8}}
FEW, DIGITS = 8, 6  # tokens


def spread(tag, shape, shift):
    """Values of a tensor that a test can make again: multiples of 1/128 below 1, times 2^-shift."""
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    return ((((tag * 7919 + i * 104729 + i * i % 10007) % 251) - 125).double() / 128 * 2.0**-shift).reshape(shape)


def sketch(value, tag):
    """The norm, and the product with spread values, which sees rows in another place."""
    value = torch.as_tensor(value)
    product = (value * spread(tag, value.shape, 0)).sum().item()
    return [float(f"{figure:.{DIGITS}g}") for figure in (value.norm().item(), product)]


def reads(family, keys):
    """The keys that the family's classes know: of their configuration under either name, or read by their source."""
    config = type(small_config(family))
    modules = [config.__module__, config.__module__.replace("configuration_", "modeling_")]
    source = "".join(inspect.getsource(importlib.import_module(name)) for name in modules if importlib.util.find_spec(name))
    known = {field.name for field in dataclasses.fields(config)} | set(sum(config.attribute_map.items(), ()))
    return [key for key in keys if key in known
            or re.search(rf"""(getattr\(\s*(self\.)?config,\s*|kwargs[^\n]*)["']{key}["']|config\.{key}\b""", source)]


def fixtures(options):
    """Writes tests/data/families: a block of each family with its results, for a test without torch."""
    path = f"{ROOT}/tests/data/hf_families.json"
    with open(path) as file:
        families = json.load(file)
    for family, entry in families.items():
        if "config" in entry:
            entry["reads"] = reads(family, families["keys"])
    with open(path, "w") as file:
        lines = (f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in families.items())
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
    for family, more in FIXTURES.items():
        torch.manual_seed(options.seed)
        model = small_model(family, torch.float32, **more)
        _, layer, number = moe_of(model)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            state, config = load_file(f"{folder}/model.safetensors"), json.loads(model.config.to_json_string())
            block = sorted(n for n in state if re.search(rf"\.{number}\..*(moe|ffn|feed_forward|mlp)\.", n))
            for tag, name in enumerate(block):
                state[name] = spread(tag, state[name].shape, 4 if "bias" in name else 3).float()
            save_file(state, f"{folder}/model.safetensors", metadata={"format": "pt"})
            model = type(model).from_pretrained(folder, dtype=torch.float64).train()
        model.set_experts_implementation("eager") if hasattr(model, "set_experts_implementation") else None
        x, dy = spread(100, (FEW, H), 0), spread(101, (FEW, H), 0)
        results, gradients = run_block(model, x, dy)
        kept = {key: config[key] for key in config if key not in ("architectures", "dtype", "transformers_version")}
        write_json(f"{ROOT}/tests/data/families/{family}.json", {
            "config": kept, "layer": number, "tokens": FEW, "tensors": {name: list(state[name].shape) for name in block},
            "results": {name: sketch(value, 102) for name, value in results.items()},
            "gradients": {name: sketch(gradients[name], 103) for name in block if name in gradients}})
    return {}, True


# ---- training: the model and PyTorch's arms
VOCAB, SEQ, BATCH, HIDDEN, LAYERS, EXPERTS, TOPK, WIDTH = 256, 128, 8, 128, 2, 8, 2, 128
TRAINING = {"lr": 2e-3, "min_lr": 2e-4, "lr_warmup_iters": 10, "lr_warmup_style": "from_first_step", "weight_decay": 0.1,
            "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0}
COEFFICIENT = 0.01  # of Megatron's balancing loss, in the setting that has one


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
# What families are trained with besides small sizes: dense layers and their width, rotary embeddings, constants.
TRAINED = {"qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
           "mixtral": {"intermediate_size": WIDTH, "sliding_window": None},
           "granitemoe": {"intermediate_size": WIDTH, "attention_multiplier": 32**-0.5},
           "granitemoeshared": {"intermediate_size": WIDTH, "attention_multiplier": 32**-0.5},
           "qwen2_moe": {"qkv_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 256},
           "hy_v3": {},
           "glm4_moe": {"attention_bias": True, "use_qk_norm": True},
           "olmoe": {"intermediate_size": WIDTH},
           "minimax_m2": {"intermediate_size": WIDTH,
                          "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
           "dots1": {"norm_topk_prob": True, "intermediate_size": 200},  # is padded to 256
           "sarvam_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
           "solar_open": {"rope_parameters": YARN},
           "deepseek_v3": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
           "kimi_k2": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
           "glm4_moe_lite": {"v_head_dim": 48, "mlp_layer_types": ["dense", "sparse"]},
           "sarvam_mla": {"q_lora_rank": None, "rope_parameters": YARN | {"mscale_all_dim": 1.0}},
           "deepseek_v32": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
           "glm_moe_dsa": {"v_head_dim": 48},
           "deepseek_v2": {"q_lora_rank": None, "n_shared_experts": 2, "intermediate_size": 200,
                           "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0}


def model_of(family, seed, **more):
    common = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32, num_experts_per_tok=TOPK, max_position_embeddings=SEQ, pad_token_id=None,
                  intermediate_size=2 * WIDTH, moe_intermediate_size=WIDTH, tie_word_embeddings=False, attention_dropout=0.0)
    torch.manual_seed(seed)
    config = small_config(family, **common | TRAINED.get(family, {}) | more)
    if config.num_experts_per_tok == EXPERTS and getattr(config, "n_group", None):
        config.topk_group = config.n_group
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = "eager"
    model.config._experts_implementation = "eager"  # one expert after the other
    for name, bias in model.named_buffers():
        if "bias" in name:  # of the router: it moves by a rule of its own, and stays here
            torch.nn.init.normal_(bias, std=0.05)
    for name, bias in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(bias, std=0.05)
    return model.float().train()


KINDS = {"embedding": r"embed_tokens", "head": r"lm_head", "norms": r"norm", "qkv": r"([qkv]|q_[ab]|kv_b)_proj|kv_a_proj",
         "proj": r"o_proj", "router": r"\.(gate|router)\.weight", "fc1": r"(gate|up)_proj|input_linear",
         "fc2": r"down_proj|output_linear"}


def learning_rate(step, steps):
    """model/train/optimizer.cpp: linear warm-up, in short runs until their end, then a cosine."""
    t, warmup = TRAINING, min(TRAINING["lr_warmup_iters"], steps)
    if step < warmup:
        return t["lr"] * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return t["min_lr"] + 0.5 * (t["lr"] - t["min_lr"]) * (1 + math.cos(math.pi * done))


def megatron_balancing(all_logits):
    """Of each layer, with its counts held constant, added over the layers."""
    total = 0.0
    for logits in all_logits:
        tokens = logits.shape[0]
        probs = torch.softmax(logits.float(), -1)
        counts = torch.bincount(logits.topk(TOPK).indices.flatten(), minlength=EXPERTS).float()
        total = total + COEFFICIENT * EXPERTS / (TOPK * tokens * tokens) * (counts * probs.sum(0)).sum()
    return total


class Arm:
    """A model that trains in FP64, or in BF16 (with E4M3 experts) with FP32 masters and FP32 moments, as mixed precision does."""

    def __init__(self, model, kind, balancing):
        self.model, self.balancing, self.logits = copy.deepcopy(model), balancing, []
        ffns = [p for n, p in self.model.named_parameters() if re.search(f"{KINDS['fc1']}|{KINDS['fc2']}", n)]
        self.mode = {"fp64": Fp64(), "bf16": contextlib.nullcontext(), "fp8": E4m3(ffns)}[kind]
        wide, narrow = (torch.float64, torch.float64) if kind == "fp64" else (torch.float32, torch.bfloat16)
        self.masters = {n: p.detach().to(wide, copy=True).requires_grad_() for n, p in self.model.named_parameters()}
        for p in self.model.parameters():  # buffers (rotary frequencies) stay FP32
            p.data = p.data.to(narrow)
        groups = [{"params": [p for n, p in self.masters.items() if (p.dim() == 1) == vector],
                   "weight_decay": 0.0 if vector else TRAINING["weight_decay"]} for vector in (False, True)]
        self.optimizer = torch.optim.AdamW(groups, betas=(TRAINING["adam_beta1"], TRAINING["adam_beta2"]),
                                           eps=TRAINING["adam_eps"])
        for module in self.model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda _module, _inputs, output: self.logits.append(output[0]))

    def backward(self, windows):
        """Loss of the batch; gradients into the masters."""
        self.logits.clear()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])
                p.grad = None
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with self.mode:
            logits = self.model(input_ids=inputs, use_cache=False).logits.float().reshape(-1, VOCAB)
            loss = total = torch.nn.functional.cross_entropy(logits, targets.reshape(-1))
            if self.balancing:
                if len(self.logits) != LAYERS:
                    sys.exit(f"{len(self.logits)} routers were seen, {LAYERS} are there: transformers "
                             f"{transformers.__version__} names them otherwise")
                total = loss + megatron_balancing(self.logits)
        total.backward()
        for name, p in self.model.named_parameters():
            master = self.masters[name]
            master.grad = None if p.grad is None else p.grad.to(master.dtype)  # DSA's indexer has no gradient
        return loss.item()

    def step(self, windows, step, steps):
        loss = self.backward(windows)
        torch.nn.utils.clip_grad_norm_(self.masters.values(), TRAINING["clip_grad"])
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        self.optimizer.step()
        return loss


# ---- training: fp8flow's arm
def train(options, folder, out, settings, arguments=()):
    """`fp8flow train` of the model in `folder`/hf; returns the folder it wrote."""
    settings = {"model.seq_length": SEQ, "training.micro_batch_size": BATCH, "training.global_batch_size": BATCH,
                "training.train_iters": options.steps, "training.lr_decay_style": "cosine", "training.eval_iters": 0,
                "training.seed": options.seed, "data.data_kind": "synthetic",
                "data.synthetic_vocab_size": VOCAB, "data.synthetic_order": 1,
                **{f"training.{key}": value for key, value in TRAINING.items()}, **settings}
    with open(f"{folder}/run.yaml", "w") as file:
        file.write("output: {log_interval: 50}\n")
    line = [options.fp8flow, "train", f"{folder}/run.yaml", "--hf-config", f"{folder}/hf", "--backend", options.backend,
            "--out", f"{folder}/{out}", *arguments, *jobs.sets(settings)]
    jobs.run(line, env=jobs.environment())
    return f"{folder}/{out}"


def windows_of(options, folder, settings=None):
    """[steps, batch, seq + 1]: what the run will read."""
    import numpy
    out = train(options, folder, "tokens", settings or {}, ["--dump-samples", str(options.steps * BATCH)])
    return torch.from_numpy(numpy.load(f"{out}/samples.npy")).long().reshape(options.steps, BATCH, SEQ + 1)


def losses_of(options, folder, settings):
    with open(train(options, folder, "run", settings, ["--weights", f"{folder}/hf", "--overwrite"]) + "/metrics.jsonl") as file:
        losses = [record["lm_loss"] for record in map(json.loads, file) if "lm_loss" in record]
    if len(losses) != options.steps:
        sys.exit(f"{len(losses)} losses of {options.steps} steps in metrics.jsonl")
    return losses


def first_gradients(options, folder, settings, model):
    """Of the first step, from the weights that it exports: where epsilon is far above the gradient, AdamW's step is
    lr / epsilon times the gradient."""
    epsilon, rate = 1e4, 1e7
    one = {"training.train_iters": 1, "training.lr_warmup_iters": 0, "training.lr": rate, "training.min_lr": rate,
           "training.weight_decay": 0, "training.clip_grad": 0, "training.adam_eps": epsilon}
    out = train(options, folder, "first", {**settings, **one},
                ["--weights", f"{folder}/hf", "--export", "f32", "--overwrite"])
    after = dict(transformers.AutoModelForCausalLM.from_pretrained(f"{out}/hf", dtype=torch.float32).named_parameters())
    return {name: (p.detach().double() - after[name].detach().double()) * (epsilon / rate)
            for name, p in model.named_parameters() if name in after}


def folds_error(options, folder, family):
    """Of the logits of a model with constants, which an export has in its weights."""
    model = model_of(family, options.seed, **GRANITE)
    model.save_pretrained(f"{folder}/hf")
    still = {"training.train_iters": 1, "training.lr": 0, "training.min_lr": 0, "training.lr_warmup_iters": 0}
    out = train(options, folder, "still", still, ["--weights", f"{folder}/hf", "--export", "f32", "--overwrite"])
    tokens = torch.randint(VOCAB, (2, SEQ))
    with torch.no_grad():
        return error(type(model).from_pretrained(f"{out}/hf", dtype=torch.float32)(tokens).logits, model(tokens).logits)


# ---- training: the comparison
def gradient_errors(got, want, target):
    """Norm-wise errors: of all together, how many tensors are within the target, their median, the largest of a kind. An expert's
    is a tensor."""
    both = [torch.cat([side[name].double().flatten() for name in want]) for side in (got, want)]
    tensors = {f"{name} {i}": error(one, other) for name in want for i, (one, other) in
               enumerate(zip(got[name], want[name]) if want[name].dim() == 3 else [(got[name], want[name])])}
    return {"all": error(*both), "tensors": len(tensors), "within": sum(e <= target for e in tensors.values()),
            "median": statistics.median(tensors.values()), "kinds": {
                kind: compare_layer.largest([0.0, *(e for n, e in tensors.items() if re.search(pattern, n))])
                for kind, pattern in KINDS.items()}}


def loss_error(got, want):
    return sum(abs(a - b) / b for a, b in zip(got, want)) / len(want)


def settings_of(model, balancing):
    settings = {"moe.moe_router_load_balancing_type": "[aux_loss]", "moe.moe_aux_loss_coeff": f"[{COEFFICIENT}]"}
    bias = any("bias" in name for name, _ in model.named_buffers())
    return (settings if balancing else {}) | ({"moe.moe_router_bias_update_rate": 0} if bias else {})


def gradients(options, folder, model, balancing, batch):
    """Errors of the first step's gradients, arm by arm."""
    save(model, options.family, f"{folder}/hf")
    found = {}
    for kind in ("fp64", "bf16", "fp8"):
        arm = Arm(model, kind, balancing)
        arm.backward(batch)
        found[f"torch {kind}"] = {name: p.grad for name, p in arm.masters.items() if p.grad is not None}
    for recipe in options.recipes.split(","):
        settings = settings_of(model, balancing) | {"precision.recipe": recipe}
        found[recipe] = first_gradients(options, folder, settings, model)
    want = found.pop("torch fp64")
    return {name: gradient_errors(got, want, TARGETS["bf16" if "bf16" in name else None]) for name, got in found.items()}


def compare_model(options, balancing, folder, model, windows):
    found = gradients(options, folder, model, balancing, windows[0])
    torch_arms = {kind: Arm(model, kind, balancing) for kind in ("fp64", "bf16", "fp8")}
    losses = {f"torch {kind}": [arm.step(batch, i, options.steps) for i, batch in enumerate(windows)]
              for kind, arm in torch_arms.items()}
    for recipe in options.recipes.split(","):
        losses[recipe] = losses_of(options, folder, settings_of(model, balancing) | {"precision.recipe": recipe})
    want = losses.pop("torch fp64")
    return {"family": options.family, "balancing loss": f"Megatron's, coefficient {COEFFICIENT:g}" if balancing else "none",
            "last loss": round(want[-1], 6),
            "arms": {name: {"mean loss": loss_error(of, want), "gradient": found[name]} for name, of in losses.items()}}


def figures(gradient):
    return {"all": gradient["all"], "median": gradient["median"], **gradient["kinds"]}


def beyond(options, what, arms):
    """What of fp8flow's is more than `bound` times PyTorch's own in BF16, or with E4M3 experts."""
    pairs = [(recipe, name, value, arms["torch bf16" if recipe == "bf16" else "torch fp8"][name])
             for recipe in options.recipes.split(",") for name, value in arms[recipe].items()]
    return [f"{what}, {recipe}: {name} {ours:.2e}, PyTorch's {floor:.2e}" for recipe, name, ours, floor in pairs
            if not ours <= options.bound * floor]


def reported(options, what, gradients_of, losses=None):
    """Prints a table; returns what is beyond its bound. A token that goes to another expert changes the gradients of experts by
    more than rounding does: single tensors have bounds where every token goes to every expert."""
    print(f"\n{what}\n  {'arm':<11} {'loss':>9} {'in target':>9} " +
          " ".join(f"{name:>9}" for name in figures(gradients_of["torch bf16"])))
    for name, found in gradients_of.items():
        loss = f"{losses[name]:.1e}" if losses else ""
        print(f"  {name:<11} {loss:>9} {found['within']:>4}/{found['tensors']:<4} "
              + " ".join(f"{value:9.1e}" for value in figures(found).values()), flush=True)
    names = ("all", "median") if losses else figures(gradients_of["torch bf16"])
    problems = beyond(options, what, {arm: {name: figures(of)[name] for name in names} for arm, of in gradients_of.items()})
    return problems + [f"{what}, {arm}: {of['within']} tensors within {TARGETS[None]:g}, PyTorch has {gradients_of['torch fp8']['within']}"
                       for arm, of in gradients_of.items() if not losses and "bf16" not in arm
                       and of["within"] < min(of["tensors"], gradients_of["torch fp8"]["within"])]


def brief(gradients_of):
    """For the file: lists by arm."""
    kinds = [max(found["kinds"].items(), key=lambda item: item[1]) for found in gradients_of.values()]
    return {"d all": [float(f"{found['all']:.1e}") for found in gradients_of.values()],
            "d median": [float(f"{found['median']:.1e}") for found in gradients_of.values()],
            "worst d": [f"{kind} {value:.1e}" for kind, value in kinds],
            "in target": [found["within"] for found in gradients_of.values()],
            "tensors": gradients_of["torch bf16"]["tensors"]}


def briefs(comparison):
    arms = comparison.pop("arms")
    return comparison | {"mean loss": [float(f"{arm['mean loss']:.1e}") for arm in arms.values()],
                         **brief({name: arm["gradient"] for name, arm in arms.items()}),
                         **({"all experts": brief(comparison["all experts"])} if "all experts" in comparison else {})}


def training(options):
    print(f"{LAYERS} layers, hidden {HIDDEN}, {EXPERTS} experts of width {WIDTH}, top-{TOPK}; {options.steps} steps of "
          f"{BATCH} x {SEQ} tokens, seed {options.seed}; errors against FP64")
    comparisons, problems = [], []
    for family in (options.families or ",".join(TRAINED)).split(","):
        options.family = family
        with tempfile.TemporaryDirectory() as folder:
            model, everywhere = model_of(family, options.seed), model_of(family, options.seed, num_experts_per_tok=EXPERTS)
            save(model, family, f"{folder}/hf")
            windows = windows_of(options, folder)
            for balancing in (False, True) if family in ("qwen3_moe", "mixtral") else (False,):
                found = compare_model(options, balancing, folder, model, windows)
                comparisons.append(found)
                what = f"{family}, balancing loss {found['balancing loss']}"
                problems += reported(options, what, {name: arm["gradient"] for name, arm in found["arms"].items()},
                                     {name: arm["mean loss"] for name, arm in found["arms"].items()})
                if not balancing:
                    found["all experts"] = gradients(options, f"{folder}/all", everywhere, False, windows[0])
                    problems += reported(options, f"{family}, every token at every expert", found["all experts"])
            if family.startswith("granite"):
                comparisons[-1]["folds"] = folds_error(options, folder, family)
                print(f"  logits of an export with constants in its weights: {comparisons[-1]['folds']:.1e}")
                if comparisons[-1]["folds"] > 1e-2:
                    problems.append(f"{family}: folded constants")
    # of all models: one training takes one of many paths
    problems += beyond(options, "all models", {name: {"mean loss": statistics.mean(
        found["arms"][name]["mean loss"] for found in comparisons)} for name in comparisons[0]["arms"]})
    print("\nloss: mean relative error over the steps; then norm-wise errors of the first step's gradients: how many tensors are within "
          "4.5e-3 (bf16) or 8e-2, all together, the median, and the largest tensor of each kind")
    print("\n".join(problems) or f"every figure is within {options.bound:g} x PyTorch's own")
    return {"steps": options.steps, "tokens per step": BATCH * SEQ, "seed": options.seed, "bound": options.bound,
            "arms": list(comparisons[0]["arms"]), "comparisons": [briefs(found) for found in comparisons]}, not problems


# ---- predictions
SONG = 48  # tokens of the repeated text


def stream_of(options, folder):
    """Settings for a stream of tokens in two documents: windows of one repeated text between random ones, which have
    the lower half of the vocabulary."""
    draw = torch.Generator().manual_seed(options.seed)
    song = torch.randint(VOCAB // 2, VOCAB, (SONG,), generator=draw).repeat(2 + SEQ // SONG)
    stream = windows_of(options, folder, {"data.synthetic_vocab_size": VOCAB // 2})[..., :-1].reshape(-1, SEQ)
    for i in range(1, len(stream), 2):
        first = i * 7 % SONG
        stream[i] = song[first:first + SEQ]
    with open(f"{folder}/stream.bin", "wb") as file:
        array.array("i", stream.flatten().tolist()).tofile(file)
    half = stream.numel() // 2
    preprocess_data.write_index(f"{folder}/stream.idx", "i", array.array("i", [half, stream.numel() - half]))
    return stream.flatten().tolist(), song.tolist(), {
        "data.data_kind": "megatron", "data.data_path": f"[{folder}/stream]", "data.held_out_fraction": 0.5,
        "precision.recipe": options.recipe}


def evaluated(options, folder, exported, stream, data):
    """Loss and accuracy of the second half of the stream, cut into windows."""
    jobs.run([options.fp8flow, "evaluate", f"{folder}/run.yaml", "--hf-config", exported, "--weights", exported, "--backend",
              options.backend, "--windows", "1e9", "--out", f"{folder}/evaluated", *jobs.sets({
                  "model.seq_length": SEQ, "training.micro_batch_size": 2, **data})],
             env=jobs.environment())
    with open(f"{folder}/evaluated/evaluate.json") as file:
        ours = json.load(file)["sources"][0]
    half = len(stream) // 2
    return stream[half:half + ours["tokens"] + 1], ours["loss"], ours["next_token_accuracy"]


def generated(options, folder, exported, prompt, count):
    out = jobs.run([options.fp8flow, "generate", f"{folder}/run.yaml", "--hf-config", exported, "--weights", exported,
                    "--backend", options.backend, "--tokens", ",".join(map(str, prompt)), "--temperature", "0",
                    "--max-tokens", str(count), *jobs.sets({"model.seq_length": SEQ, "precision.recipe": options.recipe})],
                   env=jobs.environment())
    return [int(token) for token in out.strip().splitlines()[-1].split(",")]


def greedy(prompt, ours, load):
    """64 greedy tokens of both, the gaps between the two largest logits, and BF16's errors of logits."""
    tokens = load(torch.bfloat16).generate(torch.tensor([prompt]), max_new_tokens=len(ours), do_sample=False,
                                           eos_token_id=None, pad_token_id=0)[0, len(prompt):].tolist()
    exact, rounded = (load(dtype)(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1:].double()
                      for dtype in (torch.float64, torch.bfloat16))
    best, errors = exact.topk(2).values, (rounded - exact).abs().max(-1).values
    same = next((i for i, (a, b) in enumerate(zip(tokens, ours)) if a != b), len(tokens))
    row = {"greedy tokens alike": same, "smallest gap": (best[:, 0] - best[:, 1]).min().item(),
           "largest BF16 error": errors.max().item()}
    if same < len(tokens):
        row |= {"gap of the next": abs(exact[same, tokens[same]] - exact[same, ours[same]]).item(),
                "BF16 error there": errors[same].item()}
    return row


def predictions(options):
    rows, holds = [], True
    for family in (options.families or "qwen3_moe,mixtral,dots1").split(","):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model_of(family, options.seed).save_pretrained(f"{folder}/hf")
            stream, song, data = stream_of(options, folder)
            exported = train(options, folder, "run", data, ["--weights", f"{folder}/hf", "--export", "bf16"]) + "/hf"
            held_out, loss, accuracy = evaluated(options, folder, exported, stream, data)

            def load(dtype):
                model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=dtype)
                model.set_experts_implementation("eager")
                return model
            windows = torch.tensor(held_out[:-1]).reshape(-1, SEQ)
            logits, targets = load(torch.float32)(windows).logits.flatten(0, 1), torch.tensor(held_out[1:])
            want = torch.nn.functional.cross_entropy(logits, targets).item()
            right = (logits.argmax(-1) == targets).float().mean().item()
            row = greedy(song[:32], generated(options, folder, exported, song[:32], 64), load)
        rows.append({"family": family, "loss": loss, "loss, transformers": want, "accuracy": accuracy,
                     "accuracy, transformers": right, **row})
        print(f"{family}: loss {loss:.5f}, transformers {want:.5f}; accuracy {accuracy:.4f}, {right:.4f}; " +
              ", ".join(f"{name} {value:.2g}" for name, value in row.items()), flush=True)
        holds = holds and abs(loss - want) <= 7e-4 and abs(accuracy - right) <= 5e-3 and (
            row.get("gap of the next", 0) <= 2 * row.get("BF16 error there", 0))
    return {"steps": options.steps, "recipe": options.recipe, "models": rows}, holds


def main():
    parser = jobs.command_line(__doc__)
    of_layer, of_training, of_predictions, of_fixtures = jobs.commands(parser, layer, training, predictions, fixtures)
    for command in (of_layer, of_training, of_predictions, of_fixtures):
        command.add_argument("--fp8flow", default=f"{ROOT}/build/cpu/fp8flow", help="the program")
        command.add_argument("--families", help="default: all")
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--json", help="write the figures to this file")
    of_layer.set_defaults(norm=False, stages=False)
    of_layer.add_argument("--backend", default="auto")
    of_layer.add_argument("--recipes", default="bf16,fp8_blockwise,fp8_flow")
    of_layer.add_argument("--ranks", type=int, default=1)
    of_layer.add_argument("--device", default="cpu", help="of PyTorch's BF16 block")
    of_training.add_argument("--recipes", default="bf16,fp8_flow")
    of_predictions.add_argument("--recipe", default="bf16")
    for command in (of_training, of_predictions):
        command.add_argument("--backend", default="reference")
        command.add_argument("--steps", type=int, default=200)
    of_training.add_argument("--bound", type=float, default=2.0, help="times PyTorch's own error")
    options = parser.parse_args()
    if missing:
        print(f"skipped: {missing}; pip install torch transformers safetensors")
        return 77
    if not os.access(options.fp8flow, os.X_OK):
        parser.error(f"{options.fp8flow}: no such program; build it, or name it with --fp8flow")
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()  # of token ids beyond the small vocabulary
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    report, holds = options.action(options)
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        write_json(options.json, {**jobs.origin(), **versions, **report})
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
