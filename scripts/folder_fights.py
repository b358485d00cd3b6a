#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Two runs at once with one --out, and runs that are killed at random moments and resumed: whoever gets a folder ends with the losses, norms and
the last checkpoint of a run left alone, byte for byte. A run that finds an owner waits some seconds for its end; then it has the
folder, or is refused.

  fights  two runs of 1 or 2 ranks, up to half the time of one apart, each with --overwrite, --resume auto or neither
  kills   a run is killed with SIGKILL after a random time, up to six times, each time resumed with --resume auto

  scripts/folder_fights.py --fights 50 --kills 50 --json fights.json
Needs the program and Python alone. Exit status 0 if everything holds, 1 if not.
"""

import argparse
import datetime
import glob
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time

from jobs import ROOT, commit, environment, kill_ranks, machine, mpirun
from resume_matrix import metrics_of, state_of

ITERS, INTERVAL = 96, 16
REFUSED = 15  # the folder has an owner
MODES = {"neither": [], "overwrite": ["--overwrite"], "resume": ["--resume", "auto"]}


def start(options, out, ranks, mode):
    settings = {"training.train_iters": ITERS, "checkpoint.save_interval": INTERVAL, "checkpoint.most_recent_k": ITERS,
                "parallel.expert_model_parallel_size": ranks, "moe.moe_combine_order": "invariant"}
    line = [options.fp8flow, "train", f"{ROOT}/configs/test.yaml", "--backend", "reference", "--out", out, *MODES[mode]]
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    return subprocess.Popen([*mpirun(ranks), *line] if ranks > 1 else line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())


def outcome(out):
    """What a finished run leaves."""
    return metrics_of(out), state_of(out, ITERS)


def check_folder(out, straight):
    """Problems of a folder, as text; every folder must hold one whole run."""
    ranks = [r for r in straight if outcome(out) == straight[r]]
    problems = [] if ranks else [f"{os.path.basename(out)} has not the bits of a run left alone"]
    left = glob.glob(f"{out}/**/*.tmp", recursive=True) + [path for path in glob.glob(f"{out}/.lock*") if os.path.getsize(path)]
    return problems + [f"{os.path.basename(out)} keeps {os.path.basename(path)}" for path in left]


def fight(options, folder, straight, chance, seconds):
    out, runs = f"{folder}/run", []
    for i in range(2):
        time.sleep(chance.uniform(0, seconds / 2) if i else 0)
        ranks, mode = chance.choice((1, 2)), chance.choice(list(MODES))
        runs.append({"ranks": ranks, "mode": mode, "process": start(options, out, ranks, mode)})
    problems = []
    for run in runs:
        try:
            text, _ = run["process"].communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            run["process"].kill()
            return [f"{run['mode']} on {run['ranks']} hangs"], runs
        run["status"] = run.pop("process").returncode
        if run["status"] not in (0, REFUSED):
            problems.append(f"{run['mode']} on {run['ranks']}: exit status {run['status']}: {text[-300:]}")
    if all(run["status"] == REFUSED for run in runs):
        problems.append("both are refused")
    for found in glob.glob(f"{folder}/run*"):
        problems += check_folder(found, straight)
    return problems, runs


def killed_until_done(options, out, ranks, chance, seconds):
    """Kills a run up to six times, then resumes it to its end; returns how often it was killed. seconds: what a run left alone takes."""
    kills, wanted = 0, chance.randint(1, 6)
    while True:
        process = start(options, out, ranks, "resume")
        try:
            text, _ = process.communicate(timeout=chance.uniform(0.05, seconds) if kills < wanted else options.timeout)
        except subprocess.TimeoutExpired:
            kill_ranks(process, ranks)
            process.communicate()
            kills += 1
            continue
        if process.returncode != 0:
            raise RuntimeError(f"after {kills} kills: exit status {process.returncode}: {text[-500:]}")
        return kills


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8flow", default=f"{ROOT}/build/cuda-release/fp8flow")
    parser.add_argument("--fights", type=int, default=50)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a run hangs")
    parser.add_argument("--json", help="the report goes there")
    options = parser.parse_args()
    if not os.access(options.fp8flow, os.X_OK):
        options.fp8flow = f"{ROOT}/build/cpu/fp8flow"
    chance, failed = random.Random(options.seed), []
    report = {"command": shlex.join(["scripts/folder_fights.py", "--fights", str(options.fights), "--kills", str(options.kills)]),
              "date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine(), "fights": [], "kills": []}
    with tempfile.TemporaryDirectory() as folder:
        straight, seconds = {}, 0.0
        for ranks in (1, 2):
            began = time.time()
            process = start(options, f"{folder}/straight{ranks}", ranks, "neither")
            text, _ = process.communicate()
            if process.returncode != 0:
                sys.exit(text)
            straight[ranks], seconds = outcome(f"{folder}/straight{ranks}"), max(seconds, time.time() - began)
        for i in range(options.fights):
            os.mkdir(f"{folder}/{i}")
            problems, runs = fight(options, f"{folder}/{i}", straight, chance, seconds)
            report["fights"].append({"runs": [{k: v for k, v in run.items() if k != "process"} for run in runs], "problems": problems})
            failed += problems
            who = " against ".join(f"{run['mode']} on {run['ranks']}" for run in runs)
            print(f"[fight {i + 1}/{options.fights}] {who}: {'; '.join(problems) or 'held'}", flush=True)
        done = 0
        while done < options.kills:
            ranks = chance.choice((1, 2))
            out = f"{folder}/killed{len(report['kills'])}"
            kills = killed_until_done(options, out, ranks, chance, seconds)
            problems = [] if outcome(out) == straight[ranks] else [f"after {kills} kills other bits than a run left alone"]
            report["kills"].append({"ranks": ranks, "kills": kills, "problems": problems})
            failed += problems
            done += kills
            print(f"[{done} of {options.kills} kills] {kills} of a run on {ranks}: {'; '.join(problems) or 'held'}", flush=True)
    report["held"] = not failed
    print(f"\n{len(report['fights'])} fights, {done} kills of {len(report['kills'])} runs: {'all held' if not failed else f'{len(failed)} problems'}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
