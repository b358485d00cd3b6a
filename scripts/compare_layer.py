#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares `fp8flow replay` with a MoE layer written here in numpy, in float64: output, routing, input gradient and every weight gradient,
for the layers of DeepSeek-V3, Qwen3-MoE and Mixtral under several recipes. Needs numpy and a built fp8flow; safetensors files are read and
written below, so that nothing else has to be installed. Take `reference` out and put your own layer in its place.

  scripts/compare_layer.py                                       every family under bf16, fp8_blockwise and fp8_flow, small shapes
  scripts/compare_layer.py --families mixtral --ranks 2          two ranks share the experts
  scripts/compare_layer.py --norm                                the RMSNorm in front of the layer is part of it
  scripts/compare_layer.py --stages                              also what each GEMM of the experts read and wrote, stage by stage
Exit status 0 if every error is below its bound, 1 if not, 77 without numpy.
"""

import functools
import glob
import json
import os
import subprocess
import sys
import tempfile

from jobs import ROOT, command_line, mpirun, read_safetensors, write_json

try:
    import numpy as np
except ImportError:
    np = None

# ---- safetensors: 8 bytes of length, a JSON header, the bytes ------------------------------------------------------------------------

NUMPY_OF = {"F32": "f4", "F64": "f8", "I32": "i4", "I64": "i8", "U8": "u1", "BF16": "u2", "F8_E4M3": "u1"}


def to_bf16(x):
    """Bits of the nearest BF16 number, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x):
    """The nearest BF16 numbers, as floats."""
    return from_bf16(to_bf16(x))


def save(path, tensors):
    """tensors: name -> array of float32 (stored as BF16), float64 (stored as F32), or (dtype name, array of its bits)."""
    header, parts, end = {}, [], 0
    for name, value in tensors.items():
        if isinstance(value, tuple):
            dtype, value = value
        elif value.dtype == np.float32:
            dtype, value = "BF16", to_bf16(value)
        else:
            dtype, value = "F32", value.astype(np.float32)
        data = np.ascontiguousarray(value).tobytes()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(parts))


def load(path):
    tensors = {}
    for name, (dtype, shape, data) in read_safetensors(path).items():
        array = np.frombuffer(data, NUMPY_OF[dtype]).reshape(shape)
        tensors[name] = from_bf16(array) if dtype == "BF16" else array
    return tensors


# ---- the layers ------------------------------------------------------------------------------------------------------------------------

T, H, F, E, K = 96, 256, 128, 8, 2
GROUPS, GROUP_TOPK, SCALING = 4, 1, 2.5  # deepseek_v3
EPS, NORM = 1e-6, "model.layers.0.post_attention_layernorm.weight"


def config_of(family):
    common = dict(model_type=family, hidden_act="silu", hidden_size=H, num_hidden_layers=1, num_experts_per_tok=K, rms_norm_eps=EPS,
                  vocab_size=1024, num_attention_heads=4, num_key_value_heads=2, head_dim=64, rope_theta=1e4)
    if family == "mixtral":
        return dict(common, intermediate_size=F, num_local_experts=E)
    if family == "qwen3_moe":
        return dict(common, intermediate_size=F, moe_intermediate_size=F, num_experts=E, norm_topk_prob=True)
    return dict(common, intermediate_size=F, moe_intermediate_size=F, n_routed_experts=E, n_shared_experts=1, n_group=GROUPS,
                topk_group=GROUP_TOPK, routed_scaling_factor=SCALING, scoring_func="sigmoid", topk_method="noaux_tc",
                norm_topk_prob=True, first_k_dense_replace=0)


E4M3 = [c / 8 * 2.0**-6 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]  # without the sign


def fp8_weight(name, values):
    """FP8 values and 128x128 scales that are no powers of two, as DeepSeek-V3's; and the real values."""
    table, blocks = np.array(E4M3), np.abs(values).reshape(values.shape[0] // 128, 128, values.shape[1] // 128, 128)
    scales = (blocks.max((1, 3)) / 448).astype(np.float32)
    scale = np.kron(scales, np.ones((128, 128), np.float32))
    nearest = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(values) / scale)
    bits = (nearest + 128 * (values < 0)).astype(np.uint8)
    real = np.copysign(table[nearest].astype(np.float32) * scale, values).astype(np.float64)
    return {name: ("F8_E4M3", bits), name + "_scale_inv": scales.astype(np.float64)}, real


def weights_of(family, rng):
    """(tensors for the file, name -> float64 values)."""
    block = "model.layers.0." + ("block_sparse_moe." if family == "mixtral" else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    stored, real = {}, {}

    def add(name, shape, std):
        values = rounded(rng.normal(0, std, shape))
        stored[name], real[name] = values, values.astype(np.float64)

    def add_matrix(name, shape, std):
        if family != "deepseek_v3":
            return add(name, shape, std)
        tensors, real[name] = fp8_weight(name, rng.normal(0, std, shape))
        stored.update(tensors)

    add(block + "gate.weight", (E, H), 0.1)
    places = [f"{block}experts.{e}." for e in range(E)]
    if family == "deepseek_v3":
        bias = rng.normal(0, 0.05, E).astype(np.float32)
        stored[block + "gate.e_score_correction_bias"] = bias.astype(np.float64)
        real["bias"] = bias.astype(np.float64)
        places.append(block + "shared_experts.")
    for place in places:
        add_matrix(f"{place}{gate}.weight", (F, H), H**-0.5)
        add_matrix(f"{place}{up}.weight", (F, H), H**-0.5)
        add_matrix(f"{place}{down}.weight", (H, F), F**-0.5)
    names = {"block": block, "gate": gate, "up": up, "down": down}
    return stored, real, names


def expert(real, place, names, x, dy, p):
    """y = p * W2 (silu(W1 x) * (W3 x)) for the given rows, its gradients, and the intermediates, under the names of --intermediates."""
    w1, w3, w2 = (real[f"{place}{names[which]}.weight"] for which in ("gate", "up", "down"))
    g, u = x @ w1.T, x @ w3.T
    s = 1 / (1 + np.exp(-g))
    a = g * s * u
    y = a @ w2.T
    da = dy @ w2
    dg, du = p * da * u * (s + g * s * (1 - s)), p * da * g * s
    grads = {f"{place}{names['down']}.weight": (p * dy).T @ a, f"{place}{names['gate']}.weight": dg.T @ x,
             f"{place}{names['up']}.weight": du.T @ x}
    dx = dg @ w1 + du @ w3
    stages = {"dispatch": x, "fc1": np.hstack([g, u]), "swiglu": p * a, "fc2": p * y,
              "grad_fc2": dy, "grad_swiglu": da, "grad_fc1": np.hstack([dg, du]), "grad_dispatch": dx}
    return p * y, dx, (dy * y).sum(1), grads, stages


def reference(family, real, names, x, dy):
    """The layer in float64: (output, ids, weights, input gradient), gradients of weights, and stages: of the experts by number, "shared."."""
    wg = real[names["block"] + "gate.weight"]
    logits = x @ wg.T
    rows = np.arange(T)[:, None]
    if family == "deepseek_v3":
        scores = 1 / (1 + np.exp(-logits))
        choice = scores + real["bias"]
        grouped = choice.reshape(T, GROUPS, E // GROUPS)
        best = -np.sort(-grouped, axis=2)[:, :, :2].sum(2)
        kept = np.argsort(-best, axis=1, kind="stable")[:, :GROUP_TOPK]
        mask = np.zeros((T, GROUPS), bool)
        mask[rows, kept] = True
        choice = np.where(np.repeat(mask, E // GROUPS, axis=1), choice, -np.inf)
        ids = np.argsort(-choice, axis=1, kind="stable")[:, :K]
        chosen = scores[rows, ids]
        total = chosen.sum(1, keepdims=True)
        p = SCALING * chosen / total
    else:
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :K]
        chosen = np.exp(logits[rows, ids] - logits.max(1, keepdims=True))
        p = chosen / chosen.sum(1, keepdims=True)
    y, dx, dp, grads, stages = np.zeros((T, H)), np.zeros((T, H)), np.zeros((T, K)), {}, {}
    for e in range(E):
        t, k = np.nonzero(ids == e)
        ye, dxe, dpe, ge, stages[e] = expert(real, f"{names['block']}experts.{e}.", names, x[t], dy[t], p[t, k][:, None])
        np.add.at(y, t, ye)
        np.add.at(dx, t, dxe)
        dp[t, k] = dpe
        grads.update(ge)
    if family == "deepseek_v3":
        ys, dxs, _, gs, stages["shared."] = expert(real, names["block"] + "shared_experts.", names, x, dy, np.ones((T, 1)))
        y, dx = y + ys, dx + dxs
        grads.update(gs)
        ds = SCALING * (dp / total - (dp * chosen).sum(1, keepdims=True) / total**2)
        dchosen = ds * chosen * (1 - chosen)
    else:
        dchosen = p * (dp - (p * dp).sum(1, keepdims=True))
    dlogits = np.zeros((T, E))
    dlogits[rows, ids] = dchosen
    grads[names["block"] + "gate.weight"] = dlogits.T @ x
    results = {"output": y, "topk_ids": ids, "topk_weights": p, "grad_hidden_states": dx + dlogits @ wg, "grad_topk_weights": dp}
    return results, grads, stages


def with_norm(layer, gamma, x, dy):
    """The same after an RMSNorm."""
    r = 1 / np.sqrt((x * x).mean(1, keepdims=True) + EPS)
    want, grads, stages = layer(x * r * gamma, dy)
    dxn = want["grad_hidden_states"]
    want["grad_hidden_states"] = r * (dxn * gamma - x * r * r * (dxn * gamma * x).mean(1, keepdims=True))
    grads[NORM] = (dxn * x * r).sum(0)
    return want, grads, stages


# ---- the comparison --------------------------------------------------------------------------------------------------------------------

# Largest norm-wise error ||got - want|| / ||want|| of output, input gradient, expert gradients and router gradient. One rounding to BF16 is
# 1.6e-3, one quantisation to E4M3 2.6e-2, and independent ones add as squares: this allows 13 of the one, about 10 of the other (12 in
# gradients of weights), in a row.
# After a norm the router sees slightly different tokens, since the output of the norm is rounded too.
BOUNDS = {"bf16": (6e-3, 6e-3, 6e-3, 6e-3), None: (8e-2, 8e-2, 9e-2, 9e-2)}
BOUND_WEIGHTS, BOUND_WEIGHTS_NORM, MORE_WITH_NORM = 1e-5, 5e-3, 1.3
ERRORS = ["weights", "output", "d hidden", "d experts", "d router"]


def error(got, want):
    """Norm-wise; 0 where both are zero, as gradients of an expert without tokens are."""
    with np.errstate(divide="ignore"):
        return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if np.any(got) or np.any(want) else 0.0


def largest(errors):
    """NaN where one is NaN: max() would keep a number in front of it."""
    return float(np.max(list(errors)))


def bounds_of(options, recipe):
    """Of ERRORS."""
    more, weights = (MORE_WITH_NORM, BOUND_WEIGHTS_NORM) if options.norm else (1, BOUND_WEIGHTS)
    return [weights, *(more * bound for bound in BOUNDS.get(recipe, BOUNDS[None]))]


def layer_errors(got, grads, want, want_grads):
    """Tokens routed alike, and ERRORS: the largest of a routing weight, then norm-wise ones. The order of a token's experts is free."""
    if set(grads) != set(want_grads):
        sys.exit(f"gradients differ in names: {sorted(set(grads) ^ set(want_grads))}")
    (ids, weights), (want_ids, want_weights) = (
        [np.take_along_axis(side[name], np.argsort(side["topk_ids"], axis=1), axis=1) for name in ("topk_ids", "topk_weights")]
        for side in (got, want))
    router = next(name for name in want_grads if name.endswith(".gate.weight"))
    pairs = [(grads[name], want_grads[name]) for name in want_grads if name != router]
    # files may have a weight with all experts in it
    of_experts = [error(*pair) for one in pairs for pair in (zip(*one) if one[0].ndim == 3 else [one])]
    return int((ids == want_ids).all(1).sum()), dict(zip(ERRORS, [
        float(np.abs(weights - want_weights).max()), error(got["output"], want["output"]),
        error(got["grad_hidden_states"], want["grad_hidden_states"]), largest(of_experts), error(grads[router], want_grads[router])]))


def print_head(options):
    print(f"norm-wise errors against float64; {T} tokens, hidden {H}, {E} experts of width {F}, top-{K}, {options.ranks} rank(s)\n"
          f"{'family':<17} {'arm':<14} {'routing':>8} " + " ".join(f"{name:>9}" for name in ERRORS))


def print_row(family, arm, alike, errors):
    print(f"{family:<17} {arm:<14} {alike:>4}/{T:<3} " + " ".join(f"{value:9.1e}" for value in errors.values()), flush=True)


def replay(options, recipe, folder, more=()):
    """Runs the layer; what replay wrote of it, and the gradients of its weights."""
    out = f"{folder}/{recipe}"
    command = [*(mpirun(options.ranks) if options.ranks > 1 else []), options.fp8flow, "replay", "--hf-config", f"{folder}/config.json",
               "--input", f"{folder}/layer.safetensors", "--out", out, "--backend", options.backend, "--set",
               f"precision.recipe={recipe}", "--set", f"parallel.expert_model_parallel_size={options.ranks}"]
    command += [*more, *["--norm"] * options.norm, *["--intermediates"] * options.stages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    gradients = {}
    for path in glob.glob(f"{out}/gradients/*.safetensors"):
        gradients.update(load(path))
    return load(f"{out}/replay.safetensors"), gradients


def stage_errors(options, want, want_stages, out):
    """name -> error over all rows of all experts; where a row lies, its rank's file says."""
    pairs, per_rank = {}, E // options.ranks
    files = [load(f"{out}/intermediates.rank{rank}.safetensors") for rank in range(options.ranks)]
    for e in range(E):
        file = files[e // per_rank]
        first, count = (file[f"plan.{name}"][e % per_rank] for name in ("first_row_of_expert", "rows_of_expert"))
        rows = slice(first, first + count)
        tokens = np.nonzero((want["topk_ids"] == e).any(1))[0]
        if not np.array_equal(file["plan.token_of_row"][rows], tokens):
            sys.exit(f"{out}: the rows of expert {e} are of other tokens")
        for name, value in want_stages[e].items():
            pairs.setdefault(name, []).append((file[name][rows], value))
    of_tokens = {f"shared.{name}": value for name, value in want_stages.get("shared.", {}).items()}
    for name, value in (of_tokens | {"grad_topk_weights": want["grad_topk_weights"]}).items():
        pairs[name] = [(np.vstack([file[name] for file in files]), value)]
    return {name: error(*map(np.vstack, zip(*of))) for name, of in pairs.items()}


def compare_family(options, family, folder):
    """Whether all recipes are within their bounds."""
    os.makedirs(folder)
    rng, holds = np.random.default_rng(options.seed), True
    stored, real, names = weights_of(family, rng)
    x, dy = rounded(rng.normal(0, 1, (T, H))), rounded(rng.normal(0, 1, (T, H)))
    layer = lambda *inputs: reference(family, real, names, *inputs)  # noqa: E731
    if options.norm:
        stored[NORM] = rounded(rng.normal(1, 0.2, H))
        layer = functools.partial(with_norm, layer, stored[NORM].astype(np.float64))
    want, want_grads, want_stages = layer(x.astype(np.float64), dy.astype(np.float64))
    save(f"{folder}/layer.safetensors", dict(stored, hidden_states=x, grad_output=dy))
    write_json(f"{folder}/config.json", config_of(family))
    for recipe in options.recipes.split(","):
        alike, errors = layer_errors(*replay(options, recipe, folder), want, want_grads)
        bounds = bounds_of(options, recipe)
        print_row(family, recipe, alike, errors)
        holds &= alike == T and all(value <= bound for value, bound in zip(errors.values(), bounds))
        if options.stages:
            stages = stage_errors(options, want, want_stages, f"{folder}/{recipe}")
            print(" " * 18 + ", ".join(f"{name} {value:.1e}" for name, value in stages.items()))
            holds &= all(value <= bounds[ERRORS.index("d experts")] for value in stages.values())
    return holds


def main():
    parser = command_line(__doc__)
    parser.add_argument("--fp8flow", default=f"{ROOT}/build/cpu/fp8flow", help="the program")
    parser.add_argument("--families", default="deepseek_v3,qwen3_moe,mixtral")
    parser.add_argument("--recipes", default="bf16,fp8_blockwise,fp8_flow")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if np is None:
        print("skipped: numpy is not installed")
        return 77
    print_head(options)
    with tempfile.TemporaryDirectory() as folder:
        holds = all([compare_family(options, family, f"{folder}/{family}") for family in options.families.split(",")])
    print("all within their bounds" if holds else "above a bound")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
