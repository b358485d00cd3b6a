# SPDX-License-Identifier: MIT
"""What the scripts that start runs share: where they run, how, and the processes below one. Imported, never run."""

import os
import platform
import shutil
import signal
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def machine():
    """GPUs and cores, for results."""
    names = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True,
                           text=True).stdout if shutil.which("nvidia-smi") else ""
    gpus = names.strip().splitlines()
    return (f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU") + f", {os.cpu_count()} CPU cores, {platform.machine()}"


def commit():
    return subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


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


def stop(process):
    """SIGKILL to a process and all below it."""
    for pid in [*descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def kill_ranks(process, ranks):
    """SIGKILL to the processes of the program itself: `process`, or below mpirun."""
    for victim in [process.pid] if ranks == 1 else descendants(process.pid):
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass
