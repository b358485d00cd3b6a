#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Jobs that lose ranks or are killed. Needs the program, its tests' library and Python alone. Exit status 0 if all cases hold.

  faults  loses a rank at every stage, in several ways. A case holds if mpirun ends within the deadline and ten seconds, one line reports an error,
          it names the lost rank (or what was thrown), and no process and no shared memory are left. Afterwards a run must work, and the
          GPUs' memory must be free. The stage is read from the notes that the ranks of a host share (model/job/watchdog.cpp); a
          library preloaded into the rank (tests/cli/faults) hits it in MPI_Init and MPI_Finalize, which are short, and throws exceptions.
  resume  kills runs with SIGKILL, between checkpoints, while one is written and at random moments, and resumes them, also on another number
          of ranks. Every loss, norm and byte of the last checkpoint must be that of a run that was not killed.

  scripts/reliability.py faults                                            all kinds and stages on 2 and 4 ranks
  scripts/reliability.py faults --backend hopper --ranks 2 --stages step,evaluation,checkpoint --json faults.json
  scripts/reliability.py resume --ranks 1,2,4 --recipes bf16,fp8_flow      1, 2 and 4 ranks of this machine
"""

import concurrent.futures
import glob
import itertools
import json
import mmap
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

import jobs
from jobs import ROOT, environment

KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "segmentation fault": signal.SIGSEGV, "abort": signal.SIGABRT,
         "throwing": signal.SIGUSR2}
# as in watchdog.h: their numbers there
STAGES = {"set_up": 2, "weights": 3, "resume": 4, "step": 5, "evaluation": 6, "checkpoint": 7, "exporting": 8, "summary": 9}
CALLS = {"load": "load", "MPI_Init": "MPI_Init_thread", "MPI_Finalize": "MPI_Finalize"}
ORDER = ["load", "MPI_Init", "set_up", "weights", "resume", "first step", "step", "evaluation", "checkpoint", "exporting", "summary", "MPI_Finalize"]
NOTES, RANK_NOTES = 64, struct.Struct("<i4xqiiiii4xq")  # waits, progress, state, pid, rank, signal, stage, step
FAULT_OF_THE_PROGRAM = 70  # the exit status of an exception that is no Error (error.h)
SOME_STEP = 5
GRACE = 10  # seconds after the deadline
ATTEMPTS = 8  # to hit the moment
COMPARED = ("iteration", "lm_loss", "load_balancing_loss", "grad_norm", "learning_rate", "held_out_loss")


def train(options, ranks, out, settings, more=(), faults=()):
    """The command line of a training run; faults: variables of its ranks."""
    settings = {"parallel.expert_model_parallel_size": ranks, **settings}
    if ranks > 4:  # more than configs/test.yaml has experts and sequences for
        settings.update({"moe.num_experts": ranks, "training.global_batch_size": 2 * ranks})
    return [*jobs.mpirun(ranks), "env", *faults, options.fp8flow, "train", f"{ROOT}/configs/test.yaml", "--backend", options.backend,
            "--out", out, *more, *jobs.sets(settings)]


def run(line):
    return jobs.run(line, env=environment())


def start(line, **streams):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(line, env=environment(), text=True, **(quiet | streams))


# ---- results of runs
def metrics_of(out):
    """What does not depend on the clock, a step or evaluation a line; a line that is being written is left out."""
    if not os.path.exists(f"{out}/metrics.jsonl"):
        return []
    with open(f"{out}/metrics.jsonl") as file:
        records = [json.loads(line) for line in file if line.endswith("\n")]
    return [{key: record[key] for key in COMPARED if key in record} for record in records if record["type"] != "run"]


def state_of(out, step):
    """name -> bytes of every tensor of a checkpoint, whichever file it is in."""
    tensors = {}
    for path in glob.glob(f"{out}/checkpoints/step_{step:08d}/rank_*.safetensors"):
        tensors.update(jobs.read_safetensors(path))
    return tensors


def outcome(out, step):
    return metrics_of(out), state_of(out, step)


# ---- faults
def fault_command(options, ranks, out, more=(), faults=()):
    # a model that can be exported, with work for every stage
    settings = {"training.train_iters": 12, "training.eval_interval": 4, "training.eval_iters": 8, "checkpoint.save_interval": 3,
                "model.qk_layernorm": "true", "moe.moe_shared_expert_intermediate_size": 0, "parallel.peer_deadline_seconds": options.deadline}
    return train(options, ranks, out, settings, ["--start-deadline", str(options.deadline), "--export", "f32", *more], faults)


def shared_memory():
    return set(glob.glob("/dev/shm/fp8flow-*"))


class Notes:
    """What the ranks of the job say they do."""

    def __init__(self, known, process):
        self.memory = None
        while self.memory is None and process.poll() is None:
            for path in shared_memory() - known:
                try:
                    with open(path, "rb") as file:
                        if os.fstat(file.fileno()).st_size > NOTES:
                            self.memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                except (OSError, ValueError):
                    pass

    def of(self, victim):
        """Its process, stage and step; a process of 0: not started."""
        if self.memory is None:
            return 0, -1, 0
        _, _, state, pid, _, _, stage, step = RANK_NOTES.unpack_from(self.memory, NOTES + 64 * victim)
        return pid if state == 1 else 0, stage, step


def strike(process, notes, victim, stage, kind):
    """Waits until the rank is in the stage; returns whether it was hit there."""
    wanted = STAGES["step" if stage == "first step" else stage]
    least = {"first step": 1, "step": SOME_STEP}.get(stage, 0)
    while process.poll() is None:
        pid, now, step = notes.of(victim)
        if pid and now == wanted and step >= least:
            try:
                os.kill(pid, KINDS[kind])
                return True
            except ProcessLookupError:
                return False
    return False


def problems_of(case, reports, status):
    """What is wrong with the report of a lost rank."""
    # nothing catches what is thrown before main and in a destructor, and not every MPI lets an exception through
    caught = case["stage"] not in CALLS or case["stage"] == "MPI_Init" and status == FAULT_OF_THE_PROGRAM
    if case["kind"] == "throwing" and caught:
        thrown = [line for line in reports if line.endswith(f"a fault thrown in rank {case['victim']}")]
        others = [line for line in reports if line not in thrown]
        if case["stage"] == "MPI_Init":  # ranks that have left it cannot know yet that the victim has reported
            others = [line for line in others if "ended by the launcher" not in line]
        problems = [] if len(thrown) == 1 and not others else [f"{len(reports)} reports, {len(thrown)} of what was thrown"]
        return problems if status == FAULT_OF_THE_PROGRAM else [*problems, f"status {status}"]
    problems = [f"{len(reports)} reports"] if len(reports) != 1 else []
    blamed = re.findall(r"rank (\d+) \(process", " ".join(reports))
    # a rank that never reached main has no name yet but its place on the host
    rightly = blamed == [str(case["victim"])] or (case["stage"] in ("load", "MPI_Init") and not blamed and bool(reports))
    return problems if rightly else [*problems, f"blames {', '.join(blamed) or 'nobody'}"]


def attempt(options, case, folder):
    """One run; None where the moment was missed."""
    out, more, faults = f"{folder}/run", [], []
    shutil.rmtree(out, ignore_errors=True)
    if case["stage"] == "resume":
        shutil.copytree(f"{folder}/base{case['ranks']}", out)
        more = ["--resume", "auto"]
    if case["stage"] == "weights":
        more = ["--weights", f"{folder}/base{case['ranks']}/hf"]
    if case["kind"] == "throwing" or case["stage"] in CALLS:
        faults = [f"LD_PRELOAD={options.faults}", f"FAULT_RANK={case['victim']}"]
    if case["stage"] in CALLS:
        faults += [f"FAULT_CALL={CALLS[case['stage']]}", f"FAULT_SIGNAL={int(KINDS[case['kind']])}"]
    known = shared_memory()
    with open(f"{folder}/err", "wb") as errors:
        process = start(fault_command(options, case["ranks"], out, more, faults), stderr=errors, start_new_session=True)
        hit = case["stage"] in CALLS or strike(process, Notes(known, process), case["victim"], case["stage"], case["kind"])
        struck = time.monotonic()
        limit = options.deadline + GRACE + (options.start if case["stage"] in CALLS else 0)
        try:
            process.wait(limit)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
            jobs.kill(*jobs.descendants(process.pid), process.pid)
            process.wait()
    seconds = time.monotonic() - struck
    if not hit or (process.returncode == 0 and not hung):
        return None
    with open(f"{folder}/err", errors="replace") as file:
        text = file.read()
    reports = [line for line in text.splitlines() if line.startswith("fp8flow: error:")]
    problems = (["hangs"] if hung else []) + problems_of(case, reports, process.returncode)
    time.sleep(0.3)
    if shared_memory() - known:
        problems.append("leaves shared memory")
    return {"seconds": round(seconds, 2), "status": process.returncode, "report": reports[0] if reports else "", "problems": problems}


def cases_of(options):
    """Every kind in every stage, to the first rank and to the last, one after the other."""
    every = itertools.product(options.stages.split(","), options.kinds.split(","), options.ranks)
    return [{"ranks": n, "victim": (0, n - 1)[i % 2], "stage": stage, "kind": kind} for i, (stage, kind, n) in enumerate(every)]


def gpu_memory():
    """MiB in use of each GPU."""
    return [int(text) for text in jobs.nvidia_smi("memory.used") if text.isdigit()]


def faults(options, folder):
    options.faults = f"{os.path.dirname(os.path.abspath(options.fp8flow))}/tests/libfp8flow_faults.so"
    began, cases, results, memory = time.time(), cases_of(options), [], gpu_memory()
    for n in options.ranks:
        run(fault_command(options, n, f"{folder}/base{n}"))
        shutil.rmtree(max(glob.glob(f"{folder}/base{n}/checkpoints/step_*")))  # so that a resumed run has something to do
    for case in cases:
        if time.time() - began > options.budget:
            break
        result = next((found for found in (attempt(options, case, folder) for _ in range(ATTEMPTS)) if found),
                      {"seconds": 0, "status": 0, "report": "", "problems": ["the moment was missed"]})
        results.append({**case, **result, "holds": not result["problems"]})
        print(f"[{len(results)}/{len(cases)}] {case['stage']:<12} {case['kind']:<18} rank {case['victim']} of {case['ranks']}: {result['seconds']:5.1f} s, "
              f"status {result['status']:>3}  {'holds' if not result['problems'] else 'FAILS: ' + ', '.join(result['problems'])}", flush=True)
    after = start(fault_command(options, options.ranks[-1], f"{folder}/after")).wait() == 0
    freed = all(now <= before + 64 for before, now in zip(memory, gpu_memory()))
    print(f"slowest end after a fault: {max(result['seconds'] for result in results):.1f} s; the run after them: {'works' if after else 'FAILS'}"
          + (f"; GPU memory: {'free again' if freed else 'NOT free again'}" if memory else ""))
    for result in results:  # names of processes and hosts say nothing to a reader
        result["report"] = re.sub(r"process \d+", "process N", re.sub(r" on \S+:", " on HOST:", result["report"]))
    more = {"deadline seconds": options.deadline, "not run": len(cases) - len(results), "the run after them": after,
            "gpu memory free again": freed if memory else None}
    return results, after and freed and len(results) == len(cases), more


# ---- resume
ITERS, INTERVAL = 48, 6


def resume_command(options, recipe, ranks, out, resume="auto"):
    settings = {"precision.recipe": recipe, "training.train_iters": ITERS, "training.eval_interval": ITERS // 2, "checkpoint.save_interval": INTERVAL,
                "checkpoint.most_recent_k": ITERS, "moe.moe_combine_order": "invariant"}
    return train(options, ranks, out, settings, ["--resume", resume])


def unfinished(out):
    return glob.glob(f"{out}/checkpoints/step_*.tmp")


def killed_run(options, recipe, ranks, point, out, chance):
    """Kills all ranks of a run: `training`: between two checkpoints; `saving`: while one is being written; `random`: at any moment. The last
    logged iteration, or None where the moment was missed."""
    after, at = chance.randrange(INTERVAL, ITERS - INTERVAL), time.monotonic() + chance.uniform(0.05, options.seconds)
    process = start(resume_command(options, recipe, ranks, out))
    at_point = lambda: point == "random" or bool(unfinished(out)) == (point == "saving")  # noqa: E731
    reached = False
    while process.poll() is None:
        if not reached:
            reached = time.monotonic() > at if point == "random" else len(metrics_of(out)) > after
            time.sleep(0.002)
        elif at_point():
            break
    jobs.kill(*jobs.descendants(process.pid))
    process.wait()
    last = max((record["iteration"] for record in metrics_of(out)), default=0)
    return last if process.returncode != 0 and last < ITERS and at_point() else None


def resume_case(options, folder, recipe, ranks, point, resumed_ranks):
    """One kill, one resume, one comparison with `model`, a run that nobody killed."""
    chance = random.Random(f"{recipe} {ranks} {point} {resumed_ranks}")
    result = {"recipe": recipe, "ranks": ranks, "killed while": point, "resumed on": resumed_ranks, "holds": False}
    for turn in range(ATTEMPTS):
        out = f"{folder}/{recipe}_{ranks}_{point}_{resumed_ranks}_{turn}"
        killed_at = killed_run(options, recipe, ranks, point, out, chance)
        if killed_at is not None:
            break
    else:
        return {**result, "result": "the moment was missed"}
    found = re.search(r"step_0*(\d+), \d+ iterations done", run(resume_command(options, recipe, resumed_ranks, out)))
    resumed_from = int(found[1]) if found else 0
    straight, off = f"{folder}/straight_{recipe}_{ranks}", 0.0
    model, (got, state) = straight, outcome(out, ITERS)
    if resumed_ranks != ranks:  # sums over ranks have another order from here on
        old = {record["iteration"]: record["lm_loss"] for record in metrics_of(straight) if "lm_loss" in record}
        model = f"{folder}/straight_{recipe}_{resumed_ranks}"
        if resumed_from > 0:
            model = f"{out}_planned"
            run(resume_command(options, recipe, resumed_ranks, model, f"{straight}/checkpoints/step_{resumed_from:08d}"))
            got = [record for record in got if record["iteration"] > resumed_from]
        loss = next(record["lm_loss"] for record in got if "lm_loss" in record)
        off = abs(loss - old[resumed_from + 1]) / loss
    equal = (got, state) == outcome(model, ITERS) and len(state) > 0
    text = f"{len(got)} records and {len(state)} tensors " + ("equal, bit for bit" if equal else "DIFFER") + (f"; first loss off by {off:.0e}" if off else "")
    return {**result, "at iteration": killed_at, "resumed from": resumed_from, "result": text, "holds": equal and off < 1e-6}


def resume(options, folder):
    ranks, recipes, results = options.ranks, options.recipes.split(","), []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        began, straight = time.monotonic(), list(itertools.product(recipes, ranks))
        list(pool.map(lambda c: run(resume_command(options, *c, f"{folder}/straight_{c[0]}_{c[1]}")), straight))
        options.seconds = (time.monotonic() - began) * options.jobs / len(straight)  # of a run
        cells = itertools.product(recipes, ranks, options.points.split(","), ranks)
        for result in pool.map(lambda c: resume_case(options, folder, *c), cells):
            results.append(result)
            print(f"{result['recipe']:<14} {result['ranks']} rank(s), kill: {result['killed while']:<8} at {result.get('at iteration', '-'):>4}, from "
                  f"{result.get('resumed from', '-'):>3} on {result['resumed on']} rank(s): {result['result']}", flush=True)
    return results, True, {}


def numbers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = jobs.command_line(__doc__)
    built = [f"{ROOT}/build/{preset}/fp8flow" for preset in ("cuda-release", "cpu")]
    all_commands = of_faults, of_resume = jobs.commands(parser, faults, resume)
    for command in all_commands:
        command.add_argument("--fp8flow", default=next(filter(os.path.exists, built), "fp8flow"),
                             help="the program; its tests' library is in tests/ next to it")
        command.add_argument("--backend", default="reference")
        command.add_argument("--json", help="the report goes there")
    of_faults.add_argument("--ranks", type=numbers, default="2,4")
    of_faults.add_argument("--stages", default=",".join(ORDER))
    of_faults.add_argument("--kinds", default=",".join(KINDS))
    of_faults.add_argument("--deadline", type=int, default=5, help="of silence, seconds")
    of_faults.add_argument("--start", type=int, default=20, help="seconds that a run may take without faults (--stages load, MPI_...)")
    of_faults.add_argument("--budget", type=float, default=1e9, help="seconds; no case starts later")
    of_resume.add_argument("--ranks", type=numbers, default="1,2,4")
    of_resume.add_argument("--recipes", default="bf16,fp8_flow")
    of_resume.add_argument("--points", default="training,saving,random", help="moments of the kill")
    of_resume.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options, began = parser.parse_args(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        cases, rest_holds, more = options.action(options, folder)
    held = sum(case["holds"] for case in cases)
    print(f"{held} of {len(cases)} hold, {time.time() - began:.0f} s")
    if options.json:
        jobs.write_json(options.json, {**jobs.origin(), **more, "held": held, "of": len(cases), "cases": cases})
    return 0 if held == len(cases) and rest_holds else 1


if __name__ == "__main__":
    sys.exit(main())
