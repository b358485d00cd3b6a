# SPDX-License-Identifier: MIT
"""What the scripts that start runs share: where they run, how, the processes below one, and reports. Imported, never run."""

import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def machine():
    """GPUs and cores, for results."""
    names = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True,
                           text=True).stdout if shutil.which("nvidia-smi") else ""
    gpus = names.strip().splitlines()
    return (f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU") + f", {os.cpu_count()} CPU cores, {platform.machine()}"


def commit():
    return subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def origin():
    """What every result says of itself (scripts/results.py check)."""
    return {"command": shlex.join([f"scripts/{os.path.basename(sys.argv[0])}", *sys.argv[1:]]), "date": datetime.date.today().isoformat(),
            "commit": commit(), "machine": machine()}


def write_json(path, value):
    with open(path, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


def environment():
    """Of ranks that share few cores."""
    return dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", OMPI_MCA_mpi_yield_when_idle="1",
                OMPI_MCA_btl_vader_single_copy_mechanism="none")


def mpirun(ranks):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "--quiet", "--bind-to", "none", "-n", str(ranks)]


def descendants(pid):
    """All processes below one, children before their parents."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(child) for child in file.read().split()]
    except OSError:
        children = []
    return [p for child in children for p in [*descendants(child), child]]


def kill(*pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def stop(process):
    """SIGKILL to a process and all below it."""
    kill(*descendants(process.pid), process.pid)
    process.wait()


def kill_ranks(process, ranks):
    """SIGKILL to the processes of the program itself: `process`, or below mpirun."""
    kill(*([process.pid] if ranks == 1 else descendants(process.pid)))
