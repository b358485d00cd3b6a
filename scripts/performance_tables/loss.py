# SPDX-License-Identifier: MIT
"""The table of losses in docs/performance.md, transposed copies in docs/numerics/accuracy.md, and comparisons with transformers in
docs/usage/data_and_weights.md."""
import re

from performance_tables.common import RESULTS, link, load, origin, source, table


def percent(value):
    return "" if value is None else f"{value * 100:.3f} %"


RUNS = [  # model, GPUs, file
    ("quickstart, 2 CPU ranks", "quickstart_recipes.json"),
    ("quickstart, one H200", "quickstart_recipes_h200.json"),
    ("107 M, 1000 iterations, 4 H200s", "validate_h200_100m.json"),
]


def loss():
    """Recipes against bf16 over a training: final held-out loss, errors of the smoothed loss, verdict."""
    rows = []
    for label, name in RUNS:
        data = load(name)
        rows += [[label, a["arm"], f"{a['held out']:.4f}", percent(a.get("max relative error")), percent(a.get("mean relative error")),
                  a["casts per step"], f"{a['wire bytes per step'] / 2**20:.2f}", f"{a['saved bytes'] / 2**20:.1f}", a["verdict"]] for a in data["arms"]]
    return (table(["run", "recipe", "held-out loss", "largest error", "mean error", "casts per step", "wire, MiB per step", "saved, MiB", "verdict"], rows, 2) +
            source(*(origin(name) for _, name in RUNS)))


def family_errors():
    """Norm-wise errors of one layer of every family against transformers' blocks in float64: output and gradient of the experts."""
    text = (RESULTS / "compare_torch_families.txt").read_text()
    errors = {}
    for row in re.findall(r"^(\S+) +(torch bf16|bf16|fp8_flow) +(\d+/\d+) +\S+ +(\S+) +\S+ +(\S+) +\S+$", text, re.M):
        family, arm, alike, output, experts = row
        errors.setdefault(family, {})[arm] = [alike, output, experts] if arm == "torch bf16" else [output, experts]
    rows = [[family] + [value for arm in ("torch bf16", "bf16", "fp8_flow") for value in arms[arm]] for family, arms in errors.items()]
    commit = re.search(r"commit ([0-9a-f]{7})", text)[1]
    return (table(["layer", "torch bf16: tokens routed alike", "output", "d experts", "bf16: output", "d experts", "fp8_flow: output", "d experts"], rows, 1) +
            source(f"{link('compare_torch_families.txt')}, commit {commit}; `torch bf16` is transformers' own block in BF16"))


def training_with_transformers():
    data = load("compare_training_cpu.json")
    rows = []
    for comparison in data["comparisons"]:
        exact = comparison["arms"][0]["losses"][-1]  # PyTorch in FP32
        for arm in comparison["arms"][1:]:
            loss, gradient = arm["loss"], arm["gradient"]
            kind = max(gradient["kinds"], key=gradient["kinds"].get)
            rows.append([comparison["family"], comparison["balancing loss"], arm["arm"], f"{exact:.4f}", f"{arm['losses'][-1]:.4f}",
                         f"{loss['mean relative']:.1e}", f"{loss['max relative']:.1e}", f"{loss['last tenth relative']:+.1e}",
                         f"{gradient['all']:.1e}", f"{kind} {gradient['kinds'][kind]:.1e}"])
    return (table(["model", "balancing loss", "arm", "last loss, torch fp32", "last loss", "mean error", "max error", "last tenth", "d all",
                   "worst kind of d"], rows, 3) +
            f"\n\n{data['steps']} steps of {data['tokens per step']} tokens, torch {data['torch']}, transformers {data['transformers']}." +
            source(origin("compare_training_cpu.json")))


TRANSPOSED = [  # run, file
    ("configs/quickstart.yaml, 2 CPU ranks", "transposed_quickstart_cpu.json"),
]


def flushed_at(iteration, tensor):
    """Share of the nonzero values of a tensor, over all weights."""
    rows = [row for row in iteration["transposed"] if row["tensor"] == tensor]
    return sum(row["flushed"] for row in rows) / sum(row["nonzero"] for row in rows)


def transposed():
    header = ["run", "copy", "values not 0", "flushed", "at iteration", "and at", "most of a norm^2", "of", "most NMSE"]
    lines = []
    for run, name in TRANSPOSED:
        iterations = load(name)["iterations"]
        first, last = iterations[0], iterations[-1]
        for tensor in ["dye^T", "dh^T", "a^T", "xe^T"]:
            rows = [(row, step["iteration"]) for step in iterations for row in step["transposed"] if row["tensor"] == tensor]
            values, flushed = (sum(row[key] for row, _ in rows) for key in ("nonzero", "flushed"))
            most, when = max(rows, key=lambda pair: pair[0]["flushed norm share"])
            lines.append([run, tensor, f"{values / 1e6:.1f} M", f"{flushed / values:.5%}".replace("%", " %"),
                          *(f"{step['iteration']}: {flushed_at(step, tensor):.5%}".replace("%", " %") for step in (first, last)),
                          f"{most['flushed norm share']:.1e}", f"{most['weight'].removesuffix('.weight')}, {when}",
                          f"{max(row['nmse'] for row, _ in rows):.1e}"])
    return table(header, lines, 2) + source(*(origin(name) for _, name in TRANSPOSED))


TABLES = {f.__name__: f for f in (loss, family_errors, training_with_transformers, transposed)}
