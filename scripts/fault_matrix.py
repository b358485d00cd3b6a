#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Loses a rank of a training run, at every stage and in several ways, and looks at how the job ends: when, with which status, with how many
reports, and whom they blame. The stage is read from the notes that the ranks of a host share (kernels/comm/watchdog.cpp), so that a rank is hit
inside it; MPI_Init and MPI_Finalize are too short for that, and a library preloaded into the rank (tests/cli/faults) hits it there. The same
library throws an exception in a rank that is sent SIGUSR2.

A case holds if mpirun ends within the deadline and ten seconds, exactly one line reports an error, it names the rank that was lost (or is what
was thrown), no process and no shared memory are left, and a run that follows works (once, at the end). With --backend hopper also the GPUs'
memory must be free again. A rank alone has nobody to report its loss: it may end without a line, and is not stopped, since nobody would notice.

  scripts/fault_matrix.py                                                   all kinds, stages and victims on 2 and 4 ranks
  scripts/fault_matrix.py --fp8flow build/cuda-release/fp8flow --backend hopper --ranks 2 --stages step,evaluation,checkpoint --json faults.json
  scripts/fault_matrix.py --ranks 8 --victims alternate
  scripts/fault_matrix.py --backend hopper --ranks 1 --kinds killed,throwing --json faults.json
Needs the program, its tests' library and Python alone. Exit status 0 if every case holds, 1 if not.
"""

import argparse
import datetime
import glob
import json
import mmap
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from jobs import ROOT, commit, descendants, environment, machine, mpirun

KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "segmentation fault": signal.SIGSEGV, "abort": signal.SIGABRT,
         "throwing": signal.SIGUSR2}
# as in watchdog.h: their numbers there
STAGES = {"set_up": 2, "weights": 3, "resume": 4, "step": 5, "evaluation": 6, "checkpoint": 7, "exporting": 8, "summary": 9}
CALLS = {"load": "load", "MPI_Init": "MPI_Init_thread", "MPI_Finalize": "MPI_Finalize"}
ORDER = ["load", "MPI_Init", "set_up", "weights", "resume", "first step", "step", "evaluation", "checkpoint", "exporting", "summary", "MPI_Finalize"]
NOTES, RANK_NOTES = 64, struct.Struct("<iiiiiiqq")  # state, pid, rank, waits, signal, stage, step, progress
FAULT_OF_THE_PROGRAM = 70  # the exit status of an exception that is no Error (error.h)
ITERATIONS, SOME_STEP = 12, 5
GRACE = 10  # seconds after the deadline
# a model that can be exported, with work for every stage
SETTINGS = {"training.train_iters": ITERATIONS, "training.eval_interval": 4, "training.eval_iters": 8, "checkpoint.save_interval": 3,
            "model.qk_layernorm": "true", "moe.moe_shared_expert_intermediate_size": 0}


def command_of(options, ranks, out, more=(), faults=()):
    line = [options.fp8flow, "train", options.config, "--backend", options.backend, "--out", out, "--start-deadline", str(options.deadline),
            "--export", "f32", *more]
    settings = dict(SETTINGS, **{"parallel.expert_model_parallel_size": ranks, "parallel.peer_deadline_seconds": options.deadline})
    if ranks > 4:  # more than configs/test.yaml has experts and sequences for
        settings.update({"moe.num_experts": ranks, "training.global_batch_size": 2 * ranks})
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    return [*mpirun(ranks), "env", *faults, *line]


def shared_memory():
    return set(glob.glob("/dev/shm/fp8flow-*"))


def gpu_memory():
    """MiB in use of each GPU; empty without."""
    if not shutil.which("nvidia-smi"):
        return []
    text = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout
    return [int(word) for word in text.split() if word.isdigit()]


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
        state, pid, _, _, _, stage, step, _ = RANK_NOTES.unpack_from(self.memory, NOTES + 64 * victim)
        return pid if state == 1 else 0, stage, step


class NotesOfOne:
    """The notes of a rank alone, which shares them with nobody: in its own memory."""

    def __init__(self, program, process):
        symbols = subprocess.run(["nm", "--demangle", program], capture_output=True, text=True, check=True).stdout
        offset = int(re.search(r"^([0-9a-f]+) \w .*::lone_rank$", symbols, re.MULTILINE)[1], 16)
        self.memory = None
        while self.memory is None and process.poll() is None:
            for pid in descendants(process.pid):
                try:
                    if os.path.samefile(f"/proc/{pid}/exe", program):
                        with open(f"/proc/{pid}/maps") as maps:
                            self.address = int(maps.readline().split("-")[0], 16) + offset
                        self.memory = open(f"/proc/{pid}/mem", "rb", buffering=0)
                except (OSError, ValueError):
                    pass

    def of(self, _):
        try:
            notes = os.pread(self.memory.fileno(), RANK_NOTES.size, self.address)
        except (OSError, AttributeError):
            notes = b""
        if len(notes) < RANK_NOTES.size:
            return 0, -1, 0
        state, pid, _, _, _, stage, step, _ = RANK_NOTES.unpack(notes)
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
    # nothing catches what is thrown in CALLS: before main, in MPI_Init, which no rank has left yet, and in a destructor
    if case["kind"] == "throwing" and case["stage"] not in CALLS:
        thrown = [line for line in reports if line.endswith(f"a fault thrown in rank {case['victim']}")]
        problems = [] if len(reports) == len(thrown) == 1 else [f"{len(reports)} reports, {len(thrown)} of what was thrown"]
        return problems if status == FAULT_OF_THE_PROGRAM else [*problems, f"status {status}"]
    if case["ranks"] == 1:
        return [f"{len(reports)} reports"] if reports else []
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
        process = subprocess.Popen(command_of(options, case["ranks"], out, more, faults), stdout=subprocess.DEVNULL, stderr=errors,
                                   env=environment(), start_new_session=True)
        hit = case["stage"] in CALLS or strike(process, Notes(known, process) if case["ranks"] > 1 else NotesOfOne(options.fp8flow, process),
                                               case["victim"], case["stage"], case["kind"])
        struck = time.monotonic()
        limit = options.deadline + GRACE + (options.start if case["stage"] in CALLS else 0)
        try:
            process.wait(limit)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
            for pid in [*descendants(process.pid), process.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
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


def run_case(options, case, folder):
    for _ in range(options.attempts):
        result = attempt(options, case, folder)
        if result is not None:
            return {**case, **result, "holds": not result["problems"]}
    return {**case, "seconds": 0, "status": 0, "report": "", "problems": [f"missed {options.attempts} times"], "holds": False}


def base_runs(options, ranks, folder):
    for n in ranks:
        done = subprocess.run(command_of(options, n, f"{folder}/base{n}"), capture_output=True, text=True, env=environment())
        if done.returncode != 0:
            sys.exit(f"a run without faults fails:\n{done.stdout}{done.stderr}")
        # so that a resumed run has something to do
        newest = sorted(glob.glob(f"{folder}/base{n}/checkpoints/step_*"))[-1]
        shutil.rmtree(newest)


def table(cases):
    stages = [stage for stage in ORDER if any(case["stage"] == stage for case in cases)]
    kinds = [kind for kind in KINDS if any(case["kind"] == kind for case in cases)]
    lines = [f"{'stage':<14}" + "".join(f"{kind:>22}" for kind in kinds)]
    for stage in stages:
        cells = []
        for kind in kinds:
            here = [case for case in cases if case["stage"] == stage and case["kind"] == kind]
            held = sum(case["holds"] for case in here)
            slowest = max((case["seconds"] for case in here), default=0)
            cells.append(f"{f'{held} of {len(here)}, {slowest:.1f} s':>22}" if here else f"{'-':>22}")
        lines.append(f"{stage:<14}" + "".join(cells))
    return "\n".join(lines)


def cases_of(options):
    """Every kind in every stage, to the first rank and to the last, or to one after the other."""
    cases = []
    for stage in options.stages.split(","):
        for kind in options.kinds.split(","):
            for n in (int(n) for n in options.ranks.split(",")):
                if n == 1 and kind == "stopped":
                    continue
                victims = sorted({0, n - 1})
                if options.victims == "alternate":
                    victims = [victims[len(cases) % len(victims)]]
                cases += [{"ranks": n, "victim": victim, "stage": stage, "kind": kind} for victim in victims]
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8flow", default=f"{ROOT}/build/cuda-release/fp8flow", help="the program")
    parser.add_argument("--faults", help="libfp8flow_faults.so; default: tests/ beside the program")
    parser.add_argument("--config", default=f"{ROOT}/configs/test.yaml")
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--stages", default=",".join(ORDER))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--victims", choices=["both", "alternate"], default="both", help="the first and the last rank, or one of them in each case")
    parser.add_argument("--deadline", type=int, default=5, help="of silence, seconds")
    parser.add_argument("--start", type=int, default=20, help="seconds that a run may take without faults (--stages load, MPI_...)")
    parser.add_argument("--attempts", type=int, default=5, help="to hit the moment")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no case starts later")
    parser.add_argument("--commit", help="written into the report; default: of this checkout")
    parser.add_argument("--json", help="the report goes there")
    options = parser.parse_args()
    options.faults = options.faults or f"{os.path.dirname(os.path.abspath(options.fp8flow))}/tests/libfp8flow_faults.so"
    ranks = [int(n) for n in options.ranks.split(",")]
    cases = cases_of(options)
    began, results, memory = time.time(), [], gpu_memory()
    with tempfile.TemporaryDirectory() as folder:
        base_runs(options, ranks, folder)
        began_cases = time.time()
        for i, case in enumerate(cases):
            if time.time() - began > options.budget:
                break
            results.append(run_case(options, case, folder))
            result = results[-1]
            left = (time.time() - began_cases) / (i + 1) * (len(cases) - i - 1)
            print(f"[{i + 1}/{len(cases)}, {left:4.0f} s left] {case['stage']:<12} {case['kind']:<18} rank {case['victim']} of {case['ranks']}: "
                  f"{result['seconds']:5.1f} s, status {result['status']:>3}  {'holds' if result['holds'] else 'FAILS: ' + ', '.join(result['problems'])}",
                  flush=True)
        after = subprocess.run(command_of(options, ranks[-1], f"{folder}/after"), capture_output=True, text=True, env=environment())
    held = sum(result["holds"] for result in results)
    freed = all(now <= before + 64 for before, now in zip(memory, gpu_memory()))
    print(f"\ncases that hold, and the slowest end after the fault\n{table(results)}\n\n{held} of {len(results)} hold ({len(cases) - len(results)} not run), "
          f"deadline {options.deadline} s, {time.time() - began:.0f} s; the run after them: {'works' if after.returncode == 0 else 'FAILS'}"
          + (f"; GPU memory: {'free again' if freed else 'NOT free again'}" if memory else ""))
    if options.json:
        report = {"command": shlex.join(["scripts/fault_matrix.py", *sys.argv[1:]]), "date": f"{datetime.date.today()}",
                  "commit": options.commit or commit(),
                  "machine": machine(), "deadline seconds": options.deadline, "not run": len(cases) - len(results),
                  "the run after them": after.returncode == 0, "gpu memory free again": freed if memory else None, "cases": results}
        for result in report["cases"]:  # names of processes and hosts say nothing to a reader
            result["report"] = re.sub(r"process \d+", "process N", re.sub(r" on \S+:", " on HOST:", result["report"]))
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return 0 if held == len(cases) and after.returncode == 0 and freed else 1


if __name__ == "__main__":
    sys.exit(main())
