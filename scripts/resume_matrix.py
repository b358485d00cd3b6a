#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Kills training runs with SIGKILL, between checkpoints and in the middle of writing one, resumes them with `--resume auto`, and compares with
runs that were left alone: every loss, norm and byte of the last checkpoint (FP32 weights, both moments, biases) must be the same. A run that
goes on with another number of ranks, its experts spread anew, is compared with one that went on from the same checkpoint of a run that nobody
killed; and its first loss with that of the old number of ranks (a sum over ranks in another order: within 1e-6).

  scripts/resume_matrix.py                                       1, 2 and 4 ranks on this machine, bf16 and fp8_flow
  scripts/resume_matrix.py --fp8flow build/cuda-release/fp8flow --ranks 1,2 --jobs 6 --json matrix.json
Needs the program and Python alone. Exit status 0 if everything holds, 1 if not.
"""

import argparse
import concurrent.futures
import datetime
import glob
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time

from jobs import ROOT, commit, environment, kill_ranks, machine, mpirun

COMPARED = ("iteration", "lm_loss", "load_balancing_loss", "grad_norm", "learning_rate", "held_out_loss")


def command_of(options, recipe, ranks, out, resume="auto"):
    settings = {"precision.recipe": recipe, "training.train_iters": options.iters, "training.eval_interval": options.iters // 2,
                "checkpoint.save_interval": options.interval, "checkpoint.most_recent_k": options.iters, "parallel.expert_model_parallel_size": ranks,
                "moe.moe_combine_order": "invariant"}
    line = [options.fp8flow, "train", options.config, "--backend", options.backend, "--out", out, "--resume", resume]
    for setting in [f"{key}={value}" for key, value in settings.items()] + options.set:
        line += ["--set", setting]
    if ranks > 1:
        line = [*mpirun(ranks), *line]
    return line


def run(options, recipe, ranks, out, resume="auto"):
    line = command_of(options, recipe, ranks, out, resume)
    done = subprocess.run(line, capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
    return done.stdout


def metrics_of(out):
    """What does not depend on the clock, a step or evaluation a line; a line that is being written is left out."""
    records = []
    try:
        with open(f"{out}/metrics.jsonl") as file:
            for line in file:
                if line.endswith("\n"):
                    record = json.loads(line)
                    if record["type"] != "run":
                        records.append({key: record[key] for key in COMPARED if key in record})
    except FileNotFoundError:
        pass
    return records


def state_of(out, step):
    """name -> bytes of every tensor of a checkpoint, whichever file it is in."""
    tensors = {}
    for path in glob.glob(f"{out}/checkpoints/step_{step:08d}/rank_*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = file.read()
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors


def unfinished(out):
    return glob.glob(f"{out}/checkpoints/step_*.tmp")


def killed_run(options, recipe, ranks, point, out, chance):
    """Starts a run and kills all its ranks: `training`: between two checkpoints; `saving`: while one is being written. The iteration that was
    logged last, or None where the moment was missed."""
    after = chance.randrange(options.interval, options.iters - options.interval)
    process = subprocess.Popen(command_of(options, recipe, ranks, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    metrics = f"{out}/metrics.jsonl"
    reached = False
    while process.poll() is None:
        if not reached:
            reached = os.path.exists(metrics) and len(metrics_of(out)) > after
            time.sleep(0.002)
        elif bool(unfinished(out)) == (point == "saving"):
            break
    kill_ranks(process, ranks)
    process.wait()
    last = max((record["iteration"] for record in metrics_of(out)), default=0)
    hit = process.returncode != 0 and last < options.iters and bool(unfinished(out)) == (point == "saving")
    return last if hit else None


def cell(options, folder, recipe, ranks, point, resumed_ranks):
    """One kill, one resume, one comparison."""
    chance = random.Random(f"{options.seed} {recipe} {ranks} {point} {resumed_ranks}")
    straight = f"{folder}/straight_{recipe}_{ranks}"
    for attempt in range(options.attempts):
        out = f"{folder}/{recipe}_{ranks}_{point}_{resumed_ranks}_{attempt}"
        killed_at = killed_run(options, recipe, ranks, point, out, chance)
        if killed_at is not None:
            break
    else:
        return {"recipe": recipe, "ranks": ranks, "killed while": point, "resumed on": resumed_ranks, "holds": False,
                "result": f"the moment was missed {options.attempts} times"}
    left = [os.path.basename(path) for path in unfinished(out)]
    text = run(options, recipe, resumed_ranks, out)
    found = re.search(r"step_0*(\d+), \d+ iterations done", text)
    resumed_from = int(found.group(1)) if found else 0
    got, want = metrics_of(out), metrics_of(straight)
    result = {"recipe": recipe, "ranks": ranks, "killed while": point, "at iteration": killed_at, "unfinished checkpoint": left,
              "resumed from": resumed_from, "resumed on": resumed_ranks}
    model, first = straight, ""
    if resumed_ranks != ranks:
        old = {record["iteration"]: record["lm_loss"] for record in want if "lm_loss" in record}
        model = f"{folder}/straight_{recipe}_{resumed_ranks}"
        if resumed_from > 0:
            model = f"{out}_planned"
            run(options, recipe, resumed_ranks, model, f"{straight}/checkpoints/step_{resumed_from:08d}")
            got = [record for record in got if record["iteration"] > resumed_from]
        want = metrics_of(model)
        loss = next(record["lm_loss"] for record in got if "lm_loss" in record)
        off = abs(loss - old[resumed_from + 1]) / loss
        first = f"; first loss {off:.0e} from that of {ranks} rank(s)"
        result["first loss off by"] = off
    a, b = state_of(out, options.iters), state_of(model, options.iters)
    equal = got == want and a == b and len(a) > 0
    result["result"] = f"{len(got)} records and {len(a)} tensors " + ("equal, bit for bit" if equal else "DIFFER") + first
    holds = equal and result.get("first loss off by", 0) < 1e-6
    return dict(result, holds=holds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8flow", default=f"{ROOT}/build/cpu/fp8flow", help="the program")
    parser.add_argument("--config", default=f"{ROOT}/configs/test.yaml")
    parser.add_argument("--set", action="append", default=[], help="more settings, as of the program")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--recipes", default="bf16,fp8_flow")
    parser.add_argument("--iters", type=int, default=48)
    parser.add_argument("--interval", type=int, default=6, help="iterations between checkpoints")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--attempts", type=int, default=8, help="to hit the moment")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", help="written into the report; default: of this checkout")
    parser.add_argument("--json", help="the report goes there")
    options = parser.parse_args()
    ranks, recipes = [int(r) for r in options.ranks.split(",")], options.recipes.split(",")
    at = options.commit or commit()
    began = time.time()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda c: run(options, *c, f"{folder}/straight_{c[0]}_{c[1]}"), [(r, n) for r in recipes for n in ranks]))
        cells = [(r, n, p, m) for r in recipes for n in ranks for p in ("training", "saving") for m in ranks]
        results = []
        for result in pool.map(lambda c: cell(options, folder, *c), cells):
            results.append(result)
            print(f"{result['recipe']:<14} {result['ranks']} rank(s) killed while {result['killed while']:<8} at {result.get('at iteration', '-'):>4}, from "
                  f"{result.get('resumed from', '-'):>3} on {result['resumed on']} rank(s): {result['result']}", flush=True)
    held = sum(result["holds"] for result in results)
    print(f"{held} of {len(results)} hold, {time.time() - began:.0f} s")
    if options.json:
        report = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "machine": machine(), "commit": at,
                  "command": " ".join(["scripts/resume_matrix.py", *sys.argv[1:]]), "held": held, "of": len(results), "cells": results}
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return 0 if held == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
