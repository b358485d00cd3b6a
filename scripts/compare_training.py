#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains a small Qwen3-MoE and a small Mixtral of the transformers package in PyTorch and, from the same weights on the same tokens, with
`fp8flow train`: the loss of every step, and the gradients of the first. PyTorch trains in FP32 and in BF16; how far its own BF16 departs from
its FP32 is the noise floor that fp8flow's bf16 recipe is compared with.

  scripts/compare_training.py                                    both families, 200 steps on the reference backend
  scripts/compare_training.py --steps 20 --families mixtral      a short look
  scripts/compare_training.py --json compare_training_cpu.json   also the figures, with date, commit, command and machine
Weights: `save_pretrained` of a random model, read by --weights and --hf-config. Tokens: `train --dump-samples`. AdamW, schedule, weight decay
(none on norms), clipping: the same rules in PyTorch's own optimizer, FP32 masters in both. Gradients of fp8flow: a run of one step without
clipping and with learning rate 0 writes a checkpoint, whose first moment is (1 - beta1) times the gradient; the same checkpoint shows that
names and layouts are understood, since its weights must be PyTorch's, bit by bit.
Two settings: without a balancing loss, and with Megatron's, which PyTorch then computes as this program does. In the second, transformers' own
loss with the coefficient that comes nearest is one more arm: another function (docs/numerics.md, balancing losses).

Needs torch, transformers and safetensors (pip install torch transformers safetensors), and a built fp8flow.
Exit status 0 if every figure of fp8flow is within --bound times PyTorch's own BF16, 1 if not, 77 where a package is missing.
"""

import argparse
import copy
import datetime
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile

from jobs import ROOT, commit, environment, machine

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # of PyTorch's threads, where others use the cores
try:
    import torch
    import transformers
    from safetensors.torch import load_file
    missing = None
except ImportError as error:
    missing = error

VOCAB, SEQ, BATCH, HIDDEN, LAYERS, EXPERTS, TOPK, WIDTH = 256, 128, 8, 128, 2, 8, 2, 128
TRAINING = {"lr": 2e-3, "min_lr": 2e-4, "lr_warmup_iters": 10, "lr_warmup_style": "from_first_step", "weight_decay": 0.1, "adam_beta1": 0.9,
            "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0}
COEFFICIENT = 0.01  # of Megatron's balancing loss, in the setting that has one


# ---- the model ---------------------------------------------------------------------------------------------------------------------------


def model_of(family, seed):
    common = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  num_experts_per_tok=TOPK, max_position_embeddings=SEQ, tie_word_embeddings=False, attention_dropout=0.0,
                  # the coefficient that makes transformers' loss the nearest to Megatron's
                  router_aux_loss_coef=COEFFICIENT * LAYERS / TOPK)
    torch.manual_seed(seed)
    if family == "mixtral":
        config = transformers.MixtralConfig(intermediate_size=WIDTH, num_local_experts=EXPERTS, sliding_window=None, **common)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(intermediate_size=2 * WIDTH, moe_intermediate_size=WIDTH, num_experts=EXPERTS,
                                             norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **common)
        model = transformers.Qwen3MoeForCausalLM(config)
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
    """A model of transformers that trains in FP32, or in BF16 with FP32 masters and FP32 moments, as mixed precision does."""

    def __init__(self, model, dtype, balancing):
        self.model, self.balancing = copy.deepcopy(model), balancing
        self.masters = {n: p.detach().clone().requires_grad_() for n, p in self.model.named_parameters()}
        for p in self.model.parameters():  # buffers (rotary frequencies) stay FP32
            p.data = p.data.to(dtype)
        decayed = [p for n, p in self.masters.items() if "norm" not in n]
        plain = [p for n, p in self.masters.items() if "norm" in n]
        t = TRAINING
        self.optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": t["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
                                           lr=t["lr"], betas=(t["adam_beta1"], t["adam_beta2"]), eps=t["adam_eps"])
        self.logits = []
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
            sys.exit(f"{len(self.logits)} routers were seen, {LAYERS} are there: transformers {transformers.__version__} names them otherwise")
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


# ---- fp8flow -----------------------------------------------------------------------------------------------------------------------------


def run(options, folder, out, settings, arguments=()):
    """`fp8flow train` of the model in `folder`/hf; returns the folder it wrote."""
    base = {"model.seq_length": SEQ, "training.micro_batch_size": BATCH, "training.global_batch_size": BATCH,
            "training.train_iters": options.steps, "training.lr_decay_style": "cosine", "training.eval_iters": 0, "training.seed": options.seed,
            "precision.recipe": options.recipe, "data.data_kind": "synthetic", "data.synthetic_vocab_size": VOCAB, "data.synthetic_order": 1,
            **{f"training.{key}": value for key, value in TRAINING.items()}, **settings}
    path = f"{folder}/run.yaml"
    with open(path, "w") as file:
        file.write("output: {log_interval: 50}\n")
    line = [options.fp8flow, "train", path, "--hf-config", f"{folder}/hf", "--backend", options.backend, "--out", f"{folder}/{out}", *arguments]
    for key, value in base.items():
        line += ["--set", f"{key}={value}"]
    done = subprocess.run(line, capture_output=True, text=True, env=dict(environment(), OMP_NUM_THREADS=str(options.threads)))
    if done.returncode != 0:
        sys.exit(f"{shlex.join(line)}\nends with {done.returncode}: {done.stderr}{done.stdout}")
    return f"{folder}/{out}"


def windows_of(options, folder):
    """[steps, batch, seq + 1]: what the run will read."""
    import numpy
    count = options.steps * BATCH
    tokens = numpy.load(run(options, folder, "tokens", {}, ["--dump-samples", str(count)]) + "/samples.npy")
    return torch.from_numpy(tokens).long().reshape(options.steps, BATCH, SEQ + 1)


def losses_of(options, folder, out, balancing):
    settings = {"moe.moe_router_load_balancing_type": "[aux_loss]", "moe.moe_aux_loss_coeff": f"[{COEFFICIENT}]"} if balancing else {}
    out = run(options, folder, out, settings, ["--weights", f"{folder}/hf"])
    with open(f"{out}/metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    keys = ("lm_loss", "lm loss")  # the latter until 0.2
    return [record[key] for record in records for key in keys if key in record], settings


def stored_names(name, value):
    """(name in a checkpoint, tensor) of a parameter of transformers, or of its gradient: experts are apart there, q, k and v together."""
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if not layer:
        yield {"model.embed_tokens.weight": "embedding.word_embeddings.weight", "model.norm.weight": "final_layernorm.weight",
               "lm_head.weight": "output_layer.weight"}[name], value
        return
    prefix, rest = f"layers.{layer[1]}.", layer[2]
    experts = re.fullmatch(r"\w+\.experts\.(gate_up_proj|down_proj)", rest)
    if experts:
        for e in range(EXPERTS):
            yield f"{prefix}moe.experts.{e}.linear_fc{1 if experts[1] == 'gate_up_proj' else 2}.weight", value[e]
        return
    ours = {"input_layernorm.weight": "input_layernorm.weight", "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
            "self_attn.o_proj.weight": "self_attention.linear_proj.weight", "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
            "self_attn.k_norm.weight": "self_attention.k_layernorm.weight"}.get(rest)
    if re.fullmatch(r"\w+\.gate\.weight", rest):
        ours = "moe.router.weight"
    if ours is None:
        sys.exit(f"{name}: no place for it is known here; transformers {transformers.__version__}")
    yield prefix + ours, value


def stored(tensors):
    """All parameters of transformers (or their gradients) under the names of a checkpoint."""
    tensors, out = dict(tensors), {}
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn."
        out[f"layers.{layer}.self_attention.linear_qkv.weight"] = torch.cat([tensors.pop(f"{attention}{which}_proj.weight") for which in "qkv"])
    for name, value in tensors.items():
        out.update(stored_names(name, value))
    return out


def first_gradients(options, folder, settings, model):
    """Of fp8flow, by the names of its checkpoint."""
    out = run(options, folder, "first", {**settings, "training.train_iters": 1, "training.lr_warmup_iters": 0, "training.lr": 0,
                                         "training.min_lr": 0, "training.clip_grad": 0, "checkpoint.save_interval": 1},
              ["--weights", f"{folder}/hf", "--overwrite"])
    tensors = load_file(f"{out}/checkpoints/step_00000001/rank_0000.safetensors")
    rest = (torch.tensor(1.0) - torch.tensor(TRAINING["adam_beta1"], dtype=torch.float32)).double()
    weights = stored({n: p.detach() for n, p in model.named_parameters()})
    gradients = {}
    for name, want in weights.items():
        got, moment = tensors[f"fp32_param.{name}"], tensors[f"exp_avg.{name}"]
        if not torch.equal(got.reshape(want.shape), want):
            sys.exit(f"{name}: the weights in the checkpoint are not those of transformers")
        gradients[name] = moment.double().reshape(want.shape) / rest
    left = {n.removeprefix("fp32_param.") for n in tensors if n.startswith("fp32_param.")} - set(weights)
    if left:
        sys.exit(f"the checkpoint has weights that transformers has not: {sorted(left)}")
    return gradients


# ---- the comparison ----------------------------------------------------------------------------------------------------------------------

KINDS = [("embedding", r"embedding\."), ("head", r"output_layer\."), ("norms", r"norm"), ("qkv", r"linear_qkv"), ("proj", r"linear_proj"),
         ("router", r"moe\.router"), ("fc1", r"linear_fc1"), ("fc2", r"linear_fc2")]


def gradient_errors(got, want):
    """Norm-wise error of all together, the largest of a tensor by kind, and of every tensor."""
    tensors = {name: ((got[name].double() - want[name].double()).norm() / want[name].double().norm()).item() for name in want}
    squares = sum((got[n].double() - want[n].double()).square().sum() for n in want), sum(want[n].double().square().sum() for n in want)
    kinds = {kind: max(e for n, e in tensors.items() if re.search(pattern, n)) for kind, pattern in KINDS}
    return {"all": (squares[0] / squares[1]).sqrt().item(), "kinds": kinds, "tensors": tensors}


def loss_errors(got, want):
    relative = [abs(a - b) / b for a, b in zip(got, want)]
    tail = len(want) // 10
    return {"first": abs(got[0] - want[0]), "mean relative": sum(relative) / len(relative), "max relative": max(relative),
            "last tenth relative": sum(got[-tail:]) / sum(want[-tail:]) - 1}


def compare(options, family, balancing, folder, model, windows):
    arms = {}
    kinds = [("torch fp32", torch.float32, balancing), ("torch bf16", torch.bfloat16, balancing)]
    if balancing:
        kinds.append(("torch fp32, transformers' loss", torch.float32, "transformers"))
    for name, dtype, loss in kinds:
        first = Arm(model, dtype, loss)
        first.backward(windows[0])
        arms[name] = {"gradients": stored({n: p.grad for n, p in first.masters.items()})}
        arm = Arm(model, dtype, loss)
        arms[name]["losses"] = [arm.step(batch, i, options.steps) for i, batch in enumerate(windows)]
    ours = f"fp8flow {options.recipe}"
    losses, settings = losses_of(options, folder, "balanced" if balancing else "plain", balancing)
    if len(losses) != options.steps:
        sys.exit(f"{len(losses)} losses of {options.steps} steps in metrics.jsonl")
    arms[ours] = {"losses": losses, "gradients": first_gradients(options, folder, settings, model)}
    want, rows = arms["torch fp32"], []
    for name, arm in arms.items():
        row = {"arm": name, "losses": [round(x, 6) for x in arm["losses"]]}
        if name != "torch fp32":
            row["loss"] = loss_errors(arm["losses"], want["losses"])
            row["gradient"] = gradient_errors(arm["gradients"], want["gradients"])
        rows.append(row)
    return {"family": family, "balancing loss": "Megatron's, coefficient %g" % COEFFICIENT if balancing else "none", "arms": rows}


def within(comparison, options):
    """What of fp8flow's is more than `bound` times PyTorch's own BF16."""
    arms = {row["arm"]: row for row in comparison["arms"]}
    ours, floor = arms[f"fp8flow {options.recipe}"], arms["torch bf16"]
    pairs = [("mean loss error", ours["loss"]["mean relative"], floor["loss"]["mean relative"]),
             ("gradient", ours["gradient"]["all"], floor["gradient"]["all"])]
    pairs += [(f"gradient of {kind}", ours["gradient"]["kinds"][kind], floor["gradient"]["kinds"][kind]) for kind, _ in KINDS]
    return [f"{comparison['family']}, balancing loss {comparison['balancing loss']}: {what} {got:.2e}, PyTorch's BF16 {bar:.2e}"
            for what, got, bar in pairs if not got <= options.bound * bar]


def print_table(comparison):
    print(f"\n{comparison['family']}, balancing loss: {comparison['balancing loss']}")
    print(f"  {'against torch fp32':<32} {'loss 1':>9} {'mean':>9} {'max':>9} {'end':>9} | {'d all':>8} " +
          " ".join(f"{kind:>9}" for kind, _ in KINDS))
    for row in comparison["arms"]:
        if "loss" not in row:
            print(f"  {row['arm']:<32} loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}")
            continue
        loss, gradient = row["loss"], row["gradient"]
        print(f"  {row['arm']:<32} {loss['first']:9.1e} {loss['mean relative']:9.1e} {loss['max relative']:9.1e} "
              f"{loss['last tenth relative']:9.1e} | {gradient['all']:8.1e} " + " ".join(f"{gradient['kinds'][k]:9.1e}" for k, _ in KINDS))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8flow", default=f"{ROOT}/build/cpu/fp8flow", help="the program")
    parser.add_argument("--families", default="qwen3_moe,mixtral")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each program")
    parser.add_argument("--bound", type=float, default=2.0, help="times PyTorch's own BF16 (default: 2)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--commit", help="written into the report; default: of this checkout")
    options = parser.parse_args()
    if missing:
        print(f"skipped: {missing}; pip install torch transformers safetensors")
        return 77
    if not os.access(options.fp8flow, os.X_OK):
        sys.exit(f"{options.fp8flow}: no such program; build it, or name it with --fp8flow")
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; {LAYERS} layers, hidden {HIDDEN}, {EXPERTS} experts of width "
          f"{WIDTH}, top-{TOPK}; {options.steps} steps of {BATCH} x {SEQ} tokens, seed {options.seed}")
    comparisons, problems = [], []
    for family in options.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(family, options.seed)
            model.save_pretrained(f"{folder}/hf")
            windows = windows_of(options, folder)
            for balancing in (None, "megatron"):
                comparisons.append(compare(options, family, balancing, folder, model, windows))
                print_table(comparisons[-1])
                problems += within(comparisons[-1], options)
    print("\nloss 1: difference of the first loss; mean, max: relative, over the steps; end: of the mean of the last tenth, signed;\n"
          "d: norm-wise errors of the first step's gradients, all together and the largest tensor of a kind")
    if options.json:
        report = {"command": shlex.join(["scripts/compare_training.py", *sys.argv[1:]]),
                  "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "commit": options.commit or commit(),
                  "machine": machine(), "torch": torch.__version__, "transformers": transformers.__version__, "steps": options.steps,
                  "tokens per step": BATCH * SEQ, "recipe": options.recipe, "seed": options.seed, "bound": options.bound,
                  "comparisons": comparisons}
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    print("\n".join(problems) if problems else f"every figure is within {options.bound:g} x PyTorch's own BF16")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
