#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes the shares that `fp8flow plan` predicts with from results of `fp8flow profile`, and checks them.

calibrate.py PROFILE > mine.json makes a file for `plan --gpu mine.json`. The files of configs/gpus are made
from three results: PROFILE of a large layer (a share for every stage and recipe), --launches of a small model
(what a launch costs) and --attention of `bench --suite model` (core attention). --datasheet prints a file of
configs/gpus with the new calibration; --check FOLDER adds the error on the profiles in it.

calibrate.py --check PROFILE_OR_FOLDER... [--gpu KIND] prints the error of predictions: every arm of every
profile is predicted by `plan` at the clock that the profile states. A run is listed apart, and counts in no
mean, if it gave the calibration, its program is older than that, or the formulas leave out a part of it. `plan`
states the error on models of other widths than those of the calibration: they gave the formulas no number.
Runs on hosts that parallel.hosts makes of one machine are listed with the range that `plan` prints if only runs
on other numbers of GPUs had been measured.
Exit status 1: a run or the mean is worse than --max-error or --max-mean-error.
"""
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import jobs

ROOT = pathlib.Path(jobs.ROOT)
KINDS = ROOT / "configs" / "gpus"
RECIPES = ("bf16", "fp8_blockwise", "fp8_flow")
DISPATCHES = ["moe layer/dispatch/forward", "moe layer/dispatch/backward"]
COMBINES = ["moe layer/combine/forward", "moe layer/combine/backward"]
LAYERS = ("moe layer", "dense layer", "attention")
LEAST_WORK = 0.25  # a stage that launches alone explain keeps this part of its time as work
ERRORS = ("mean layer error", "worst layer error", "mean step error", "worst step error", "runs", "gpus")
EARLIER = "of a program before the calibration"
HOSTS = "on hosts that parallel.hosts makes of one machine"
SOCKETS = "over sockets: the rate of this network is not known"

# What the arms of `profile --schedules` and `--state-dtypes` change. Schedules start from a serial step.
JOINED = "precision.moe_wgrad_micro_batches"
RENAMED = {"precision.moe_wgrad_pair_micro_batches": JOINED}  # true and false are read as 2 and 1
SERIAL = {"schedule.moe_shared_expert_overlap": "false", "schedule.delay_wgrad_compute": "false",
          "schedule.overlap_moe_expert_parallel_comm": "false", "schedule.overlap_grad_reduce": "false",
          "schedule.overlap_param_gather": "false", "schedule.cuda_graph_impl": "none"}
SCHEDULES = {"wgrad": {"schedule.delay_wgrad_compute": "true"},
             "shared": {"schedule.moe_shared_expert_overlap": "true"},
             "reduce": {"schedule.overlap_grad_reduce": "true"},
             "turns": {"schedule.overlap_moe_expert_parallel_comm": "true", JOINED: "1"},
             "graph": {"schedule.cuda_graph_impl": "full_iteration"}}
MOMENTS = ("training.exp_avg_dtype", "training.exp_avg_sq_dtype")
STATES = {"bf16 gradients": {"training.main_grads_dtype": "bf16"} | dict.fromkeys(MOMENTS, "fp32"),
          "bf16 state": {"training.main_grads_dtype": "bf16"} | dict.fromkeys(MOMENTS, "bf16")}


def load(path):
    return json.loads(pathlib.Path(path).read_text())


def settings_of(text):
    """{"section.key": value} of a configuration as commands print it, and of --help-config."""
    settings, section = {}, ""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and not line.startswith(" "):
            section = name
        elif colon and re.fullmatch("  [a-z0-9_]+", name):
            settings[f"{section}.{name.strip()}"] = value.strip()
    return settings


def median(row, key):
    value = row.get(key)
    return value.get("median", 0) if isinstance(value, dict) else 0


def key_of(row):
    return f"{row['part']}/{row['stage']}/{row['direction']}"


def is_kind(device, gpu):
    """True for a device "NVIDIA H200" and a GPU "H200"; "H20" is another."""
    return gpu.lower() in device.lower().split()


def kind_of(device):
    for path in sorted(KINDS.glob("*.json")):
        if is_kind(device, load(path)["gpu"]):
            return path
    sys.exit(f"no datasheet of {device} in configs/gpus: name one with --datasheet")


def shares_that_ship(sheet):
    return sheet.get("calibration") or load(KINDS / f"{sheet['shares of']}.json")["calibration"]


class Planner:
    """Predicts runs with `fp8flow plan`. `gpu`: a kind of configs/gpus, or the contents of such a file."""

    def __init__(self, program):
        self.program = program
        self.known = settings_of(self.run("--help-config").stdout)

    def run(self, *line):
        return subprocess.run([self.program, *line], capture_output=True, text=True, check=False)

    def arm_settings(self, profile, arm):
        """Keys of programs that had others are left out; they did not pair micro-batches by themselves."""
        settings = {JOINED: "1"}
        recorded = {RENAMED.get(key, key): value for key, value in settings_of(profile["config"]).items()}
        settings |= {key: value for key, value in recorded.items() if key in self.known}
        if settings[JOINED] == "auto":
            settings[JOINED] = "1"
        _, *parts = arm["name"].split(" + ")
        if not set(parts) <= {*SCHEDULES, *STATES}:
            return None
        if set(parts) & set(SCHEDULES):
            settings |= SERIAL
        for part in parts:
            settings |= SCHEDULES.get(part) or STATES[part]
        return settings

    def predict(self, settings, recipe, ranks, gpu, clock):
        """The run as `plan --json` has it, or a text that says why there is none."""
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/run.yaml", "w") as file:
                for section, keys in itertools.groupby(sorted(settings), key=lambda key: key.split(".")[0]):
                    lines = [f"  {key.split('.')[1]}: {settings[key]}\n" for key in keys]
                    file.write(f"{section}:\n" + "".join(lines))
            if isinstance(gpu, dict):
                pathlib.Path(folder, "gpu.json").write_text(json.dumps(gpu))
                gpu = f"{folder}/gpu.json"
            line = ["plan", f"{folder}/run.yaml", "--gpus", str(ranks), "--recipes", recipe, "--gpu", gpu,
                    "--out", folder, "--json", "plan.json"]
            run = self.run(*line, *(["--mhz", str(clock * 1e-6)] if clock > 0 else []))
            if run.returncode == 2:  # refused
                return run.stderr.strip().replace(f"{folder}/", "")
            if run.returncode != 0:
                sys.exit(run.stderr.strip() or run.stdout.strip())
            return load(f"{folder}/plan.json")["choices"][0]

    def row(self, path, profile, arm, gpu):
        """An arm as measured and as predicted, or a text that says why it cannot be compared."""
        settings = self.arm_settings(profile, arm)
        if settings is None:
            return f"{path.name}: {arm['name']}"
        clock = median(arm, "layer clock hertz")
        plan = self.predict(settings, arm["recipe"], profile["ranks"], gpu, clock)
        if isinstance(plan, str):
            return f"{path.name}: {arm['name']}: {plan}"
        measured = {key_of(row): median(row, "seconds") for row in arm["rows"]}
        stages = [{**stage, "key": key_of(stage), "seconds measured": measured.get(key_of(stage), 0)}
                  for stage in plan["stages"]]
        # a layer of two interleaved micro-batches lasts as long as both
        interleaved = settings.get("schedule.overlap_moe_expert_parallel_comm") == "true"
        return {"file": path.name, "name": arm["name"], "recipe": arm["recipe"],
                "commit": profile.get("commit", ""), "date": profile.get("date", "")[:10],
                "ranks": profile["ranks"], "clock hertz": clock,
                "hosts": settings.get("parallel.hosts", "").strip('"'), "range": plan["step_seconds_range"],
                "layer seconds": plan["layer_seconds"],
                "layer seconds measured": 0 if interleaved else median(arm, "layer seconds"),
                "step seconds": plan["step_seconds"], "step seconds measured": arm.get("step seconds", 0),
                "not covered": plan["not_covered"], "stages": stages,
                "widths": [settings[key] for key in ("model.hidden_size", "moe.moe_ffn_hidden_size")]}

    def arms(self, path, gpu):
        """The arms of one profile that are plain recipes, in the order of the profile."""
        path, profile = pathlib.Path(path), load(path)
        found = [self.row(path, profile, arm, gpu) for arm in profile["recipes"] if arm["name"] in RECIPES]
        found = [row for row in found if not isinstance(row, str)]
        if not found or any(row["clock hertz"] <= 0 or row["layer seconds measured"] <= 0 for row in found):
            sys.exit(f"{path}: no recipe that predictions know, or no clock of it")
        return found


# ---- the error of predictions
def profiles_of(paths):
    """Of a folder all profiles; what else is in it is skipped."""
    found = []
    for path in map(pathlib.Path, paths):
        for file in path.glob("*.json") if path.is_dir() else [path]:
            try:
                data = load(file)
            except (OSError, ValueError) as error:
                sys.exit(f"--check: {error}")
            if isinstance(data, dict) and "config" in data and "rows" in data.get("recipes", [{}])[0]:
                found.append((file, data))
            elif not path.is_dir():
                sys.exit(f"--check: {file} is no result of profile")
    return sorted(found, key=lambda one: one[0])


def error_of(row, what):
    measured = row[f"{what} seconds measured"]
    return row[f"{what} seconds"] / measured - 1 if measured > 0 else None


def summary(rows):
    result = {"runs": len(rows), "gpus": max((row["ranks"] for row in rows), default=0)}
    for what in ("layer", "step"):
        errors = [abs(error_of(row, what)) for row in rows if error_of(row, what) is not None]
        result[f"mean {what} error"] = statistics.fmean(errors or [0])
        result[f"worst {what} error"] = max(errors, default=0)
    return result


def host_runs(rows):
    """Measured steps over their predictions, 1 included."""
    ratios = [1 / (1 + error_of(row, "step")) for row in rows]
    return {"runs": len(rows), "least": min([1, *ratios]), "most": max([1, *ratios])}


def add_ranges(rows, shipped):
    """The range of each run on hosts, if the calibration had only those on other numbers of GPUs."""
    for row in rows:
        runs = host_runs([other for other in rows if other["ranks"] != row["ranks"]])
        low, high = row["range"]
        row["range"] = [low / shipped.get("least", 1) * runs["least"],
                        high / shipped.get("most", 1) * runs["most"]]
        row["inside"] = row["range"][0] <= row["step seconds measured"] <= row["range"][1]


def check(planner, paths, gpu, sheet, calibration):
    """Every arm next to its prediction, and what those that count differ by."""
    skipped, jobs, seen = [], [], set()
    for path, profile in profiles_of(paths):
        device = profile["machine"]["device"]
        run = (profile.get("commit"), profile.get("date"), profile.get("command", path.name))
        if run in seen:  # in two folders
            continue
        seen.add(run)
        if is_kind(device, sheet["gpu"]):
            jobs += [(path, profile, arm, gpu) for arm in profile["recipes"]]
        else:
            skipped.append(f"{path.name}: of {device}")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compared = list(pool.map(lambda job: planner.row(*job), jobs))
    skipped += [row for row in compared if isinstance(row, str)]
    rows = [row for row in compared if not isinstance(row, str)]
    if not rows:
        sys.exit("\n".join([f"--check: no profile of {sheet['gpu']} that can be compared"] + skipped))
    first = {row["file"]: row for row in reversed(rows)}
    calibrated = []
    for row in rows:
        source, launches = (row["file"] == calibration.get(key) for key in ("source", "launches from"))
        row["apart"] = row["not covered"] or (EARLIER if row["date"] < calibration["date"] else "")
        if row["hosts"]:
            row["apart"] = SOCKETS if "sockets" in row["file"] else HOSTS
        if row["name"] == row["recipe"] and (source or launches and row is first[row["file"]]):
            row["apart"] = "gave the calibration"
            calibrated.append(row["widths"])
    for row in rows:
        row["other model"] = row["widths"] not in calibrated
    counted = [row for row in rows if not row["apart"]]
    result = {"gpu": sheet["gpu"], **summary(counted), "rows": rows, "not compared": skipped}
    others = [row for row in counted if row["other model"]]
    if calibrated and others:
        result["other models"] = summary(others)
    hosts = [row for row in rows if row["apart"] == HOSTS]
    if hosts:
        result["hosts"] = host_runs(hosts)
        add_ranges(hosts, calibration.get("check", {}).get("hosts", {}))
    return result


def percent(value, form=".1f"):
    return "-" if value is None else f"{100 * value:{form}} %"


def table(head, rows):
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths)]
             for row in [head, ["-" * width for width in widths], *rows]]
    return "".join("  ".join([row[0].strip().ljust(widths[0]), *row[1:]]).rstrip() + "\n" for row in lines)


def check_text(result, calibration):
    counted = [row for row in result["rows"] if not row["apart"]]

    def of(key, value):
        return [row for row in counted if row[key] == value]
    groups = {"all that count": counted}
    if "other models" in result:
        groups["unseen: of other models than the calibration"] = of("other model", True)
    for ranks in sorted({row["ranks"] for row in counted}):
        groups[f"{ranks} GPU{'s' if ranks > 1 else ''}"] = of("ranks", ranks)
    groups |= {recipe: of("recipe", recipe) for recipe in sorted({row["recipe"] for row in counted})}
    groups["not counted, of earlier programs"] = [row for row in result["rows"] if row["apart"] == EARLIER]
    text = (f"Absolute error of predictions, {result['gpu']}, calibrated from {calibration['source']} "
            f"({calibration['commit']}, {calibration['date']})\n\n")
    text += table(["runs", "number", "layer, mean", "worst", "step, mean", "worst"],
                  [[name, str(len(rows)), *(percent(summary(rows)[f"{how} {what} error"])
                                            for what in ("layer", "step") for how in ("mean", "worst"))]
                   for name, rows in groups.items() if rows])
    for apart in sorted({row["apart"] for row in result["rows"]}):
        rows = [[f"{row['file'].removesuffix('.json')}: {row['name']}", str(row["ranks"]),
                 *(cell for what in ("layer", "step") for cell in (f"{1e3 * row[what + ' seconds measured']:.4g}",
                                                                   percent(error_of(row, what), "+.1f")))]
                for row in result["rows"] if row["apart"] == apart]
        head = ["profile and arm", "GPUs", "layer ms", "error", "step ms", "error"]
        if apart == HOSTS:
            head.append("range ms, from other numbers of GPUs")
            for cells, row in zip(rows, (row for row in result["rows"] if row["apart"] == apart)):
                cells.append("{:.1f} to {:.1f}{}".format(*(1e3 * one for one in row["range"]),
                                                         "" if row["inside"] else ", outside"))
        text += f"\n{'Apart: ' + apart if apart else 'Runs that count'}. Milliseconds are measured.\n\n"
        text += table(head, rows)
    return text + "".join(f"  not compared: {one}\n" for one in result["not compared"])


def print_check(planner, options):
    name = pathlib.Path(options.gpu)
    file = load(name if name.is_file() else KINDS / f"{options.gpu.lower()}.json")
    alone = "recipes" in file  # shares without a datasheet
    sheet = load(kind_of(file["gpu"])) if alone else file
    calibration = file if alone else shares_that_ship(sheet)
    result = check(planner, options.check, options.gpu, sheet, calibration)
    print(check_text(result, calibration), end="")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    worst, mean = (max(result[f"{how} {what} error"] for what in ("layer", "step"))
                   for how in ("worst", "mean"))
    if 100 * worst > options.max_error or 100 * mean > options.max_mean_error:
        sys.exit(f"worse than allowed: {options.max_error} % at most, {options.max_mean_error} % on average")


# ---- shares
class Arm:
    """One recipe of the large profile. A layer's stages are of one run, all others of a step."""

    def __init__(self, row, peer_rate, launch):
        self.row, self.peer_rate, self.launch, self.stages = row, peer_rate, launch, {}
        for stage in row["stages"]:
            runs = 1 if stage["key"].split("/")[0] in LAYERS else stage["runs"]
            own = self.stages.setdefault(stage["key"], {"launches": 0, "roofline": 0, "wire": 0,
                                                        "seconds": stage["seconds measured"]})
            own["launches"] += runs * stage["launches"]
            own["roofline"] += runs * stage["roofline_seconds"]
            own["wire"] += runs * stage["wire_bytes"]

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
        too_fast = arm["layer seconds"] < arm["layer seconds measured"]
        low, high = (middle, high) if too_fast else (low, middle)
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


def main():
    parser = jobs.command_line(__doc__)
    parser.add_argument("profile", nargs="?", help="profile.json of a large layer")
    parser.add_argument("--launches", help="profile.json of a small model with attention")
    parser.add_argument("--attention", help="bench.json of `bench --suite model`")
    parser.add_argument("--datasheet", help="a file like those of configs/gpus: printed with new shares")
    parser.add_argument("--check", nargs="+", help="profiles, or folders of profiles, to predict")
    parser.add_argument("--gpu", default="h200", help="of --check without PROFILE (default: h200)")
    parser.add_argument("--json", help="of --check without PROFILE: a file for every row")
    parser.add_argument("--max-error", type=float, default=math.inf, help="percent, of one run")
    parser.add_argument("--max-mean-error", type=float, default=math.inf, help="percent, of all runs")
    parser.add_argument("--program", default=str(ROOT / "build" / "cpu" / "fp8flow"))
    options = parser.parse_args()
    planner = Planner(options.program)
    if not options.profile:
        if not options.check:
            parser.error("want a PROFILE to make shares from, or --check")
        return print_check(planner, options)

    profile = load(options.profile)
    sheet = load(options.datasheet or kind_of(profile["machine"]["device"]))
    shipped = shares_that_ship(sheet)
    rows = planner.arms(options.profile, sheet)
    origin = {"gpu": profile["machine"]["device"], "source": pathlib.Path(options.profile).name,
              "commit": profile.get("commit", ""), "date": profile.get("date", "")[:10]}

    def make(launch):
        return {**origin, **shares_of(rows, sheet["peer bytes per second"], launch, shipped)}

    result = make(fit_launch(planner, options.launches, lambda launch: dict(sheet, calibration=make(launch)))
                  if options.launches else shipped["launch seconds"])
    if options.launches:
        result["launches from"] = pathlib.Path(options.launches).name
        first = planner.arms(options.launches, sheet)[0]
        arms = {arm["name"]: arm for arm in load(options.launches)["recipes"]}
        host = arms[first["name"]].get("host seconds", 0)
        if host > 0:
            launches = math.fsum(stage["launches"] * stage["runs"] for stage in first["stages"])
            result["host seconds per launch"] = host / launches
    if options.attention:
        result["attention from"] = pathlib.Path(options.attention).name
        result["core attention"] = core_attention(options.attention, sheet)
    if options.check:
        errors = check(planner, options.check, dict(sheet, calibration=result), sheet, result)
        result["check"] = {name: errors[name] for name in ERRORS}
        result["check"] |= {name: errors[name] for name in ("other models", "hosts") if name in errors}
    result = rounded(result)
    if options.datasheet:
        sheet.pop("clock hertz", None)  # the profile's, from now on
        result = dict(sheet, calibration=result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
