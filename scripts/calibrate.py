#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes the shares that `fp8flow plan` predicts with, from results of `fp8flow profile`.

calibrate.py PROFILE > mine.json makes a file for `plan --gpu mine.json`. The files of configs/gpus are made
from three results: PROFILE of a large layer (a share for every stage and recipe), --launches of a small model
(what a launch costs) and --attention of `bench --suite model` (core attention). --datasheet prints a file of
configs/gpus with the new calibration. --check FOLDER adds the error on the profiles in it. The counts of every
stage come from `plan --check`.
"""
import argparse
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KINDS = ROOT / "configs" / "gpus"
RECIPES = ("bf16", "fp8_blockwise", "fp8_flow")
DISPATCHES = ["moe layer/dispatch/forward", "moe layer/dispatch/backward"]
COMBINES = ["moe layer/combine/forward", "moe layer/combine/backward"]
LAYERS = ("moe layer", "dense layer", "attention")
ERRORS = ("mean layer error", "worst layer error", "mean step error", "worst step error", "runs", "gpus")
LEAST_WORK = 0.25  # a stage that launches alone explain keeps this part of its time as work


def load(path):
    return json.loads(pathlib.Path(path).read_text())


class Planner:
    """Runs `plan --check` of one profile with trial shares."""

    def __init__(self, program, sheet):
        self.program, self.sheet = program, sheet

    def check(self, path, calibration=None):
        with tempfile.TemporaryDirectory() as folder:
            gpu = dict(self.sheet, calibration=calibration) if calibration else self.sheet
            pathlib.Path(folder, "gpu.json").write_text(json.dumps(gpu))
            command = [self.program, "plan", "--check", path, "--gpu", f"{folder}/gpu.json",
                       "--json", "check.json", "--out", folder]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode != 0:
                sys.exit(run.stderr.strip() or run.stdout.strip())
            return load(f"{folder}/check.json")

    def arms(self, path, calibration=None):
        """The arms of one profile that are plain recipes, in the order of the profile."""
        rows = {row["name"]: row for row in self.check(path, calibration)["rows"]}
        names = [arm["name"] for arm in load(path)["recipes"] if arm["name"] in RECIPES]
        found = [rows[name] for name in names if name in rows]
        if not found or any(row["clock hertz"] <= 0 or row["layer seconds measured"] <= 0 for row in found):
            sys.exit(f"{path}: no recipe that predictions know, or no clock of it")
        return found


class Arm:
    """One recipe of the large profile. A layer's stages are of one run, all others of a step."""

    def __init__(self, row, peer_rate, launch):
        self.row, self.peer_rate, self.launch, self.stages = row, peer_rate, launch, {}
        for stage in row["stages"]:
            runs = 1 if stage["key"].split("/")[0] in LAYERS else stage["runs"]
            own = self.stages.setdefault(stage["key"], {"launches": 0, "roofline": 0, "wire": 0,
                                                        "seconds": stage["seconds measured"]})
            own["launches"] += runs * stage["launches"]
            own["roofline"] += runs * stage["roofline seconds"]
            own["wire"] += runs * stage["wire bytes"]

    def after_wire(self, key):
        stage = self.stages[key]
        return stage["seconds"] - stage["wire"] / self.peer_rate if stage["seconds"] > 0 else 0

    def exchange_seconds(self):
        """What a dispatch takes beyond its rows if no rank is late."""
        return max(self.launch, min(self.after_wire(key) for key in DISPATCHES))

    def share(self, key, exchange):
        stage, (part, name, _) = self.stages[key], key.split("/")
        fixed = stage["launches"] * self.launch
        if name in ("dispatch", "combine", "plan") and self.row["ranks"] > 1:
            fixed = max(exchange, fixed)
        local = max(stage["seconds"] - fixed, LEAST_WORK * stage["seconds"])
        reduction = part in ("gradient reduction", "parameter gather")
        return (stage["wire"] / self.peer_rate if reduction else stage["roofline"]) / local

    def shares(self, exchange):
        shares = {}
        for key, stage in self.stages.items():
            part = key.split("/")[0]
            if stage["seconds"] <= 0 or part == "attention" or key in DISPATCHES + COMBINES:
                continue
            if part == "gradient reduction" and stage["wire"] <= 0:  # one rank
                continue
            shares[key] = self.share(key, exchange)
        # One GPU shows what moving rows through memory takes. On several the wire hides it: SwiGLU's.
        for key in DISPATCHES + COMBINES:
            if self.stages[key]["seconds"] > 0:
                swiglu = shares.get("moe layer/swiglu/forward") if self.row["ranks"] > 1 else None
                shares[key] = swiglu or self.share(key, exchange)
        measured = sum(stage["seconds"] for key, stage in self.stages.items() if key.startswith("moe layer/"))
        return {"clock hertz": self.row["clock hertz"],
                "whole over stages": self.row["layer seconds measured"] / measured,
                "shares": dict(sorted(shares.items()))}

    def late_share(self, exchange, shares):
        """What combines take beyond their rows, of the experts' time: they wait for the slowest rank."""
        waited = worked = 0
        for key in COMBINES:
            stage = self.stages[key]
            if self.row["ranks"] == 1 or key not in shares:
                return 0
            local = stage["roofline"] / shares[key]
            waited += self.after_wire(key) - exchange - max(0, local - stage["wire"] / self.peer_rate)
        for key, stage in self.stages.items():
            if re.match(r"moe layer/(fc|swiglu/|transpose/)", key):
                worked += stage["seconds"]
        return max(waited, 0) / worked if worked > 0 else 0


def shares_of(rows, peer_rate, launch, shipped):
    """A calibration with this cost of a launch."""
    arms = {row["name"]: Arm(row, peer_rate, launch) for row in rows}
    ranks = rows[0]["ranks"]
    exchange = launch if ranks == 1 else min(arm.exchange_seconds() for arm in arms.values())
    # On two GPUs half of the rows stay, so that waits are not distinguished from passes over memory.
    known = ranks <= 2 and "exchange seconds" in shipped
    if known:
        exchange = shipped["exchange seconds"]
    recipes = {name: arms[name].shares(exchange) for name in sorted(arms)}
    late = sum(arm.late_share(exchange, recipes[name]["shares"]) for name, arm in arms.items()) / len(arms)
    if known:
        late = shipped.get("late share", 0)
    result = {"launch seconds": launch, "exchange seconds": exchange, "late share": late, "recipes": recipes}
    return {key: value for key, value in result.items() if value != 0}


def fit_launch(planner, path, make):
    """The cost of a launch with which the small model's layer takes what it took."""
    low, high = 0.0, 20e-6
    for _ in range(30):
        middle = (low + high) / 2
        arm = planner.arms(path, make(middle))[0]
        if arm["layer seconds"] < arm["layer seconds measured"]:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def core_attention(path, sheet):
    """Of each head size the largest shape. A short call holds the boost clock."""
    best = {}
    for row in load(path):
        match = re.search(r" D=([0-9]{1,6}) .*S=([0-9]{1,6})", row.get("shape", ""))
        if row.get("op") not in ("attention", "attention_backward") or not match or row.get("us", 0) <= 0:
            continue
        flops = row["flops"] * (1 + 127 / (int(match[2]) + 1))  # tiles on the diagonal are computed whole
        share = flops / (row["us"] * 1e-6) / (sheet["bf16 flops per clock"] * sheet["boost clock hertz"])
        key = (int(match[1]), "forward" if row["op"] == "attention" else "backward")
        best[key] = max(best.get(key, (0, 0)), (flops, share))
    sizes = sorted({channels for channels, _ in best})
    return [{"kv_channels": size, **{way: best[size, way][1] for way in ("forward", "backward")}}
            for size in sizes if (size, "forward") in best and (size, "backward") in best]


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(own) for key, own in value.items()}
    if isinstance(value, list):
        return [rounded(own) for own in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def kind_of(device):
    for path in sorted(KINDS.glob("*.json")):
        if load(path)["gpu"].lower() in device.lower().split():
            return path
    sys.exit(f"no datasheet of {device} in configs/gpus: name one with --datasheet")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="profile.json of a large layer")
    parser.add_argument("--launches", help="profile.json of a small model with attention")
    parser.add_argument("--attention", help="bench.json of `bench --suite model`")
    parser.add_argument("--datasheet", help="a file like those of configs/gpus: printed with new shares")
    parser.add_argument("--check", help="a folder of profiles: adds the error on them")
    parser.add_argument("--program", default=str(ROOT / "build" / "cpu" / "fp8flow"))
    options = parser.parse_args()

    profile = load(options.profile)
    sheet = load(options.datasheet or kind_of(profile["machine"]["device"]))
    shipped = sheet.get("calibration") or load(KINDS / f"{sheet['shares of']}.json")["calibration"]
    planner = Planner(options.program, sheet)
    rows = planner.arms(options.profile)
    origin = {"gpu": profile["machine"]["device"], "source": pathlib.Path(options.profile).name,
              "commit": profile.get("commit", ""), "date": profile.get("date", "")[:10]}

    def make(launch):
        return {**origin, **shares_of(rows, sheet["peer bytes per second"], launch, shipped)}

    result = make(fit_launch(planner, options.launches, make) if options.launches else
                  shipped["launch seconds"])
    if options.launches:
        result["launches from"] = pathlib.Path(options.launches).name
        first = planner.arms(options.launches)[0]
        arms = {arm["name"]: arm for arm in load(options.launches)["recipes"]}
        host = arms[first["name"]].get("host seconds", 0)
        if host > 0:
            launches = math.fsum(stage["launches"] * stage["runs"] for stage in first["stages"])
            result["host seconds per launch"] = host / launches
    if options.attention:
        result["attention from"] = pathlib.Path(options.attention).name
        result["core attention"] = core_attention(options.attention, sheet)
    if options.check:
        errors = planner.check(options.check, result)
        result["check"] = {name: errors[name] for name in ERRORS}
        if "other models" in errors:
            result["check"]["other models"] = {name: errors["other models"][name] for name in ERRORS}
    result = rounded(result)
    if options.datasheet:
        sheet.pop("clock hertz", None)  # the profile's, from now on
        result = dict(sheet, calibration=result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
