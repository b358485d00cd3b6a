#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares fp8flow with the transformers package, from the same weights. Needs torch, transformers and safetensors.

layer: `fp8flow replay` with the MoE block of every family that --hf-config reads, in float64 on the CPU: output,
  routing, input gradient and every weight gradient. The rows "torch bf16" are the same blocks in BF16 on --device:
  what PyTorch itself loses.
training: `fp8flow train` with small Qwen3-MoE and Mixtral models trained in PyTorch on the same tokens
  (--dump-samples): the loss of every step, and the gradients of the first. AdamW, schedule, weight decay (none on
  norms) and clipping follow the same rules, with FP32 masters in both. What PyTorch's BF16 differs from its FP32 is
  the noise floor. Each family trains without a balancing loss and with Megatron's, which PyTorch computes here as
  fp8flow does; transformers' own loss with the nearest coefficient is one more arm, another function.
predictions: the same models after --steps of `fp8flow train`, exported, in transformers and in `fp8flow evaluate` and
  `generate`: the loss of the same windows, and 64 greedy tokens in BF16.

  scripts/compare_torch.py layer                                 every family under bf16, fp8_blockwise and fp8_flow
  scripts/compare_torch.py layer --families olmoe --ranks 2
  scripts/compare_torch.py training --steps 20 --families mixtral
  scripts/compare_torch.py predictions --steps 40
Exit status: 0 if every error is below its bound (training: --bound times that of PyTorch's BF16; predictions: a loss
within 7e-4 nats, and the same tokens up to a tie), 1 if not, 77 without a package.
"""

import array
import copy
import importlib
import json
import math
import os
import re
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
    from safetensors.torch import save_file
    missing = None
except ImportError as problem:
    missing = problem


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# ---- layer
NO_GROUPS = {"n_group": 1, "topk_group": 1}
# family: (its configuration, its block, the layer of compare_layer.py that has its fields, and what differs)
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
    """A block with random weights that BF16 holds exactly, and its configuration. Versions of transformers differ in
    how they name and join the experts' weights; this takes the block's own parameters, whatever they are called."""
    config_name, block_name, base, own = FAMILIES[family]
    fields = compare_layer.config_of(base)
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


def run_block(block, x, dy):
    """What replay writes, of the block's own forward and backward."""
    block.zero_grad()
    parameter = next(block.parameters())
    x = x.to(parameter.device, parameter.dtype).requires_grad_()
    seen = {}
    hook = block.gate.register_forward_hook(lambda _module, _inputs, output: seen.update(gate=output))
    y = block(x[None])
    hook.remove()
    y = (y[0] if isinstance(y, tuple) else y).view_as(x)
    y.backward(dy.to(y))
    gate = seen["gate"]
    if not isinstance(gate, tuple) or len(gate) != 3:
        sys.exit(f"{type(block).__name__}: its gate gives no (logits, weights, ids) in transformers "
                 f"{transformers.__version__}; 5.x is wanted")
    results = {"output": y, "topk_weights": gate[1], "topk_ids": gate[2], "grad_hidden_states": x.grad}
    gradients = {"mlp." + name: p.grad for name, p in block.named_parameters()}
    # copies: `block.to` changes gradients in place
    return tuple({n: t.detach().cpu().to(torch.float64, copy=True).numpy() for n, t in part.items()}
                 for part in (results, gradients))


def compare_block(options, family, folder):
    """Rows of the report, and whether those of fp8flow are within their bounds."""
    torch.manual_seed(options.seed)
    try:
        block, config = block_of(family, torch.float64)
    except (ImportError, AttributeError, TypeError) as problem:
        sys.exit(f"{family}: not in transformers {transformers.__version__} as this script knows it: {problem}")
    x, dy = torch.randn(compare_layer.T, compare_layer.H).bfloat16(), torch.randn(compare_layer.T, compare_layer.H).bfloat16()
    want = run_block(block, x, dy)
    state = {"mlp." + name: (value.float() if "bias" in name else value.bfloat16()).contiguous()
             for name, value in block.state_dict().items()}
    save_file(state | {"hidden_states": x, "grad_output": dy}, f"{folder}/layer.safetensors")
    own_type = {"model_type": family} if family == "kimi_k2" else {}
    write_json(f"{folder}/config.json", json.loads(config.to_json_string()) | own_type)
    rows, holds = [], True
    for arm in ["torch bf16", *options.recipes.split(",")]:
        if arm == "torch bf16":
            got = run_block(block.to(options.device, torch.bfloat16), x, dy)
        else:
            got = compare_layer.replay(options, arm, folder)
        alike, errors = compare_layer.layer_errors(*got, *want)
        compare_layer.print_row(family, arm, alike, errors)
        rows.append({"family": family, "arm": arm, "routed alike": alike, **errors})
        if arm != "torch bf16":
            bounds = compare_layer.bounds_of(options, arm)
            holds &= alike == compare_layer.T and all(e <= bound for e, bound in zip(errors.values(), bounds))
    return rows, holds


def layer(options):
    compare_layer.print_head(options)
    rows, holds = [], True
    for family in (options.families or ",".join(FAMILIES)).split(","):
        with tempfile.TemporaryDirectory() as folder:
            more, within = compare_block(options, family, folder)
        rows, holds = rows + more, holds and within
    print("all within their bounds" if holds else "above a bound")
    return {"tokens": compare_layer.T, "arms": rows}, holds


# ---- training: the model and PyTorch's arms
VOCAB, SEQ, BATCH, HIDDEN, LAYERS, EXPERTS, TOPK, WIDTH = 256, 128, 8, 128, 2, 8, 2, 128
TRAINING = {"lr": 2e-3, "min_lr": 2e-4, "lr_warmup_iters": 10, "lr_warmup_style": "from_first_step", "weight_decay": 0.1,
            "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0}
COEFFICIENT = 0.01  # of Megatron's balancing loss, in the setting that has one


def model_of(family, seed):
    common = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32, num_experts_per_tok=TOPK, max_position_embeddings=SEQ,
                  tie_word_embeddings=False, attention_dropout=0.0,
                  # the coefficient that makes transformers' loss the nearest to Megatron's
                  router_aux_loss_coef=COEFFICIENT * LAYERS / TOPK)
    torch.manual_seed(seed)
    if family == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
            intermediate_size=WIDTH, num_local_experts=EXPERTS, sliding_window=None, **common))
    else:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
            intermediate_size=2 * WIDTH, moe_intermediate_size=WIDTH, num_experts=EXPERTS, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[], **common))
    model.config._attn_implementation = "eager"
    model.config._experts_implementation = "eager"  # one expert after the other
    return model.float().train()


def learning_rate(step, steps):
    """model/train/optimizer.cpp: linear warm-up, then a cosine."""
    t = TRAINING
    if step < t["lr_warmup_iters"]:
        return t["lr"] * (step + 1) / t["lr_warmup_iters"]
    done = (step - t["lr_warmup_iters"]) / max(1, steps - t["lr_warmup_iters"])
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
    """A model that trains in FP32, or in BF16 with FP32 masters and FP32 moments, as mixed precision does."""

    def __init__(self, model, dtype, balancing):
        self.model, self.balancing, self.logits = copy.deepcopy(model), balancing, []
        self.masters = {n: p.detach().clone().requires_grad_() for n, p in self.model.named_parameters()}
        for p in self.model.parameters():  # buffers (rotary frequencies) stay FP32
            p.data = p.data.to(dtype)
        groups = [{"params": [p for n, p in self.masters.items() if ("norm" in n) == norm],
                   "weight_decay": 0.0 if norm else TRAINING["weight_decay"]} for norm in (False, True)]
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
        out = self.model(input_ids=inputs, output_router_logits=self.balancing == "transformers", use_cache=False)
        loss = total = torch.nn.functional.cross_entropy(out.logits.float().reshape(-1, VOCAB), targets.reshape(-1))
        if len(self.logits) != LAYERS:
            sys.exit(f"{len(self.logits)} routers were seen, {LAYERS} are there: transformers {transformers.__version__} "
                     "names them otherwise")
        if self.balancing == "megatron":
            total = loss + megatron_balancing(self.logits)
        elif self.balancing == "transformers":
            total = loss + self.model.config.router_aux_loss_coef * out.aux_loss
        total.backward()
        for name, p in self.model.named_parameters():
            self.masters[name].grad = p.grad.float()
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
                "training.seed": options.seed, "precision.recipe": options.recipe, "data.data_kind": "synthetic",
                "data.synthetic_vocab_size": VOCAB, "data.synthetic_order": 1,
                **{f"training.{key}": value for key, value in TRAINING.items()}, **settings}
    with open(f"{folder}/run.yaml", "w") as file:
        file.write("output: {log_interval: 50}\n")
    line = [options.fp8flow, "train", f"{folder}/run.yaml", "--hf-config", f"{folder}/hf", "--backend", options.backend,
            "--out", f"{folder}/{out}", *arguments, *jobs.sets(settings)]
    jobs.run(line, env=jobs.environment())
    return f"{folder}/{out}"


def windows_of(options, folder):
    """[steps, batch, seq + 1]: what the run will read."""
    import numpy
    out = train(options, folder, "tokens", {}, ["--dump-samples", str(options.steps * BATCH)])
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
    after = dict(type(model).from_pretrained(f"{out}/hf", dtype=torch.float32).named_parameters())
    return {name: (p.detach().double() - after[name].detach().double()) * (epsilon / rate)
            for name, p in model.named_parameters()}


# ---- training: the comparison
KINDS = {"embedding": r"embed_tokens", "head": r"lm_head", "norms": r"norm", "qkv": r"[qkv]_proj", "proj": r"o_proj",
         "router": r"\.gate\.weight", "fc1": r"gate_up_proj", "fc2": r"down_proj"}


def gradient_errors(got, want):
    """Norm-wise error of all together, of every tensor (an expert's apart), and the largest by kind."""
    both = [torch.cat([side[name].double().flatten() for name in want]) for side in (got, want)]
    tensors = {f"{name} {i}": error(one, other) for name in want for i, (one, other) in
               enumerate(zip(got[name], want[name]) if want[name].dim() == 3 else [(got[name], want[name])])}
    return {"all": error(*both), "tensors": tensors,
            "kinds": {kind: max(e for n, e in tensors.items() if re.search(pattern, n)) for kind, pattern in KINDS.items()}}


def loss_errors(got, want):
    relative = [abs(a - b) / b for a, b in zip(got, want)]
    tail = max(1, len(want) // 10)
    return {"first": abs(got[0] - want[0]), "mean relative": sum(relative) / len(relative), "max relative": max(relative),
            "last tenth relative": sum(got[-tail:]) / sum(want[-tail:]) - 1}


def compare_model(options, family, balancing, folder, model, windows):
    kinds = {"torch fp32": (torch.float32, balancing), "torch bf16": (torch.bfloat16, balancing)}
    if balancing:
        kinds["torch fp32, transformers' loss"] = torch.float32, "transformers"
    arms = {}
    for name, kind in kinds.items():
        first, arm = Arm(model, *kind), Arm(model, *kind)
        first.backward(windows[0])
        arms[name] = ([arm.step(batch, i, options.steps) for i, batch in enumerate(windows)],
                      {n: p.grad for n, p in first.masters.items()})
    settings = {"moe.moe_router_load_balancing_type": "[aux_loss]", "moe.moe_aux_loss_coeff": f"[{COEFFICIENT}]"}
    settings = settings if balancing else {}
    arms[f"fp8flow {options.recipe}"] = (losses_of(options, folder, settings),
                                         first_gradients(options, folder, settings, model))
    (want_losses, want_gradients), rows = arms["torch fp32"], []
    for name, (losses, gradients) in arms.items():
        rows.append({"arm": name, "losses": [round(x, 6) for x in losses]})
        if name != "torch fp32":
            rows[-1].update(loss=loss_errors(losses, want_losses), gradient=gradient_errors(gradients, want_gradients))
    return {"family": family, "balancing loss": f"Megatron's, coefficient {COEFFICIENT:g}" if balancing else "none",
            "arms": rows}


def figures(row):
    return {"loss": row["loss"]["mean relative"], "d all": row["gradient"]["all"], **row["gradient"]["kinds"]}


def reported(comparison, options):
    """Prints the arms; returns what of fp8flow's is more than `bound` times PyTorch's own BF16."""
    what = f"{comparison['family']}, balancing loss {comparison['balancing loss']}"
    print(f"\n{what}\n  {'against torch fp32':<32} {'last loss':>9} " +
          " ".join(f"{name:>9}" for name in ("loss", "d all", *KINDS)))
    arms = {row["arm"]: figures(row) if "loss" in row else {} for row in comparison["arms"]}
    for row in comparison["arms"]:
        print(f"  {row['arm']:<32} {row['losses'][-1]:9.4f} " +
              " ".join(f"{value:9.1e}" for value in arms[row["arm"]].values()))
    ours, floor = arms[f"fp8flow {options.recipe}"], arms["torch bf16"]
    return [f"{what}: {name} {ours[name]:.2e}, PyTorch's BF16 {floor[name]:.2e}" for name in ours
            if not ours[name] <= options.bound * floor[name]]


def training(options):
    print(f"{LAYERS} layers, hidden {HIDDEN}, {EXPERTS} experts of width {WIDTH}, top-{TOPK}; {options.steps} steps of "
          f"{BATCH} x {SEQ} tokens, seed {options.seed}")
    comparisons, problems = [], []
    for family in (options.families or "qwen3_moe,mixtral").split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(family, options.seed)
            model.save_pretrained(f"{folder}/hf")
            windows = windows_of(options, folder)
            for balancing in (None, "megatron"):
                comparisons.append(compare_model(options, family, balancing, folder, model, windows))
                problems += reported(comparisons[-1], options)
    print("\nloss: mean relative error over the steps; d: norm-wise errors of the first step's gradients, all together and the "
          "largest tensor of a kind")
    print("\n".join(problems) or f"every figure is within {options.bound:g} x PyTorch's own BF16")
    return {"steps": options.steps, "tokens per step": BATCH * SEQ, "recipe": options.recipe, "seed": options.seed,
            "bound": options.bound, "comparisons": comparisons}, not problems


# ---- predictions
TIE = 0.05  # logits that BF16 does not distinguish: it rounds logits of 4 to 8 to multiples of 1/32
def evaluated(options, folder, exported, stream):
    """Loss and accuracy of the second half of a stream of tokens, cut into windows."""
    half = len(stream) // 2
    with open(f"{folder}/stream.bin", "wb") as file:
        array.array("i", stream).tofile(file)
    preprocess_data.write_index(f"{folder}/stream.idx", "i", array.array("i", [half, len(stream) - half]))
    jobs.run([options.fp8flow, "evaluate", f"{folder}/run.yaml", "--hf-config", exported, "--weights", exported, "--backend",
              options.backend, "--windows", "1e9", "--out", f"{folder}/evaluated", *jobs.sets({
                  "model.seq_length": SEQ, "training.micro_batch_size": 2, "precision.recipe": options.recipe,
                  "data.data_kind": "megatron", "data.data_path": f"[{folder}/stream]", "data.held_out_fraction": 0.5})],
             env=jobs.environment())
    with open(f"{folder}/evaluated/evaluate.json") as file:
        ours = json.load(file)["sources"][0]
    return stream[half:half + ours["tokens"] + 1], ours["loss"], ours["next_token_accuracy"]


def generated(options, folder, exported, prompt, count):
    out = jobs.run([options.fp8flow, "generate", f"{folder}/run.yaml", "--hf-config", exported, "--weights", exported,
                    "--backend", options.backend, "--tokens", ",".join(map(str, prompt)), "--temperature", "0",
                    "--max-tokens", str(count), *jobs.sets({"model.seq_length": SEQ, "precision.recipe": options.recipe})],
                   env=jobs.environment())
    return [int(token) for token in out.strip().splitlines()[-1].split(",")]


def predictions(options):
    rows, holds = [], True
    for family in (options.families or "qwen3_moe,mixtral").split(","):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model_of(family, options.seed).save_pretrained(f"{folder}/hf")
            stream = windows_of(options, folder)[..., :-1].flatten().tolist()
            exported = train(options, folder, "run", {}, ["--weights", f"{folder}/hf", "--export", "bf16"]) + "/hf"
            held_out, loss, accuracy = evaluated(options, folder, exported, stream)
            load = transformers.AutoModelForCausalLM.from_pretrained
            windows = torch.tensor(held_out[:-1]).reshape(-1, SEQ)
            logits, targets = load(exported, dtype=torch.float32)(windows).logits.flatten(0, 1), torch.tensor(held_out[1:])
            want = torch.nn.functional.cross_entropy(logits, targets).item()
            right = (logits.argmax(-1) == targets).float().mean().item()
            tokens = load(exported, dtype=torch.bfloat16).generate(
                windows[:1, :32], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 32:].tolist()
            ours = generated(options, folder, exported, held_out[:32], 64)
            same = next((i for i, (a, b) in enumerate(zip(tokens, ours)) if a != b), len(tokens))
            gap = 0.0  # of the logits of the first two tokens that differ
            if same < len(tokens):
                after = load(exported, dtype=torch.float32)(torch.tensor([held_out[:32] + ours[:same]])).logits[0, -1]
                gap = abs(after[tokens[same]] - after[ours[same]]).item()
        rows.append({"family": family, "loss": loss, "loss, transformers": want, "accuracy": accuracy,
                     "accuracy, transformers": right, "greedy tokens alike": same, "gap of the next": gap})
        print(f"{family}: loss {loss:.5f}, transformers {want:.5f}; accuracy {accuracy:.4f}, {right:.4f}; the first {same} "
              f"of {len(tokens)} greedy tokens alike" + (f", the next two {gap:.1e} apart" if same < len(tokens) else ""))
        holds = holds and abs(loss - want) <= 7e-4 and abs(accuracy - right) <= 5e-3 and gap <= TIE
    return {"steps": options.steps, "recipe": options.recipe, "models": rows}, holds


def main():
    parser = jobs.command_line(__doc__)
    of_layer, of_training, of_predictions = jobs.commands(parser, layer, training, predictions)
    for command in (of_layer, of_training, of_predictions):
        command.add_argument("--fp8flow", default=f"{ROOT}/build/cpu/fp8flow", help="the program")
        command.add_argument("--families", help="default: all")
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--json", help="write the figures to this file")
    of_layer.set_defaults(norm=False, stages=False)
    of_layer.add_argument("--backend", default="auto")
    of_layer.add_argument("--recipes", default="bf16,fp8_blockwise,fp8_flow")
    of_layer.add_argument("--ranks", type=int, default=1)
    of_layer.add_argument("--device", default="cpu", help="of PyTorch's BF16 block")
    for command in (of_training, of_predictions):
        command.add_argument("--backend", default="reference")
        command.add_argument("--recipe", default="bf16")
        command.add_argument("--steps", type=int, default=200)
    of_training.add_argument("--bound", type=float, default=2.0, help="times PyTorch's own BF16")
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
