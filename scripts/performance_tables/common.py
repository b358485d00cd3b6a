# SPDX-License-Identifier: MIT
"""Reads the files of docs/results; tables of Markdown and the sources under them."""
import collections
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs" / "results"
RECIPES = ["bf16", "fp8_blockwise", "fp8_flow"]


def load(name):
    return json.loads((RESULTS / name).read_text())


def table(header, rows, align_from=1):
    """A Markdown table; columns from align_from on are numbers."""
    rule = ["---" if i < align_from else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in [header, rule, *rows])


def source(*parts):
    """The line under a table."""
    return f"\n\nFrom {'; '.join(parts)}."


def link(name):
    return f"[{name}](results/{name})"  # `filled` makes it relative to the page


def origin(name):
    """Link, commit and date of a file whose rows or object carry one of each; the command is in the file."""
    data = load(name)
    rows = data if isinstance(data, list) else [data]
    numbers = collections.Counter(row["commit"] for row in rows).most_common()
    commit = numbers[0][0] + "".join(f", {count} of {len(rows)} rows {other}" for other, count in numbers[1:])
    return f"{link(name)} ({commit}, {rows[0]['date'][:10]})"


def recipe_of(profile, name):
    return next(r for r in profile["recipes"] if r["name"] == name)


def layer_ms(recipe):
    return recipe["layer seconds"]["median"] * 1e3


def stage_ms(recipe):
    """(stage, direction) -> median ms, of the MoE layer alone."""
    result = {}
    for row in recipe["rows"]:
        if row["part"] == "moe layer":
            key = (row["stage"], row["direction"])
            result[key] = result.get(key, 0.0) + row["seconds"]["median"] * 1e3
    return result


def schedule_of(recipe, plain="serial"):
    """What an arm of fp8_flow has besides: "graph" of "fp8_flow + graph"; `plain` where it has nothing."""
    return recipe["name"].replace("fp8_flow + ", "").replace("fp8_flow", plain)
