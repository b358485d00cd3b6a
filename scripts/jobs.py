# SPDX-License-Identifier: MIT
"""What the scripts that start runs share: command lines, where they run, the processes below one, and reports. Imported, never run."""

import argparse
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


# ---- command lines
def command_line(about):
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def commands(parser, *actions):
    """One parser per function; the command is named as it is."""
    adder, made = parser.add_subparsers(required=True, metavar="COMMAND"), []
    for action in actions:
        made.append(adder.add_parser(action.__name__))
        made[-1].set_defaults(action=action, error=made[-1].error)
    return made


# ---- reports
def nvidia_smi(field):
    """One text per GPU; none without."""
    if not shutil.which("nvidia-smi"):
        return []
    return run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"], check=False).split("\n")[:-1]


def git(*arguments):
    """What a git command prints; nothing if it fails."""
    return run(["git", "-C", ROOT, *arguments], check=False).strip()


def commit():
    return git("rev-parse", "--short", "HEAD")


def origin():
    """What every result says of itself (scripts/results.py check)."""
    gpus = nvidia_smi("name")
    machine = (f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU") + f", {os.cpu_count()} CPU cores, {platform.machine()}"
    return {"command": shlex.join([f"scripts/{os.path.basename(sys.argv[0])}", *sys.argv[1:]]), "date": datetime.date.today().isoformat(),
            "commit": commit(), "machine": machine}


def write_json(path, value):
    """A line for each key, and for each object of a list."""
    def text(item):
        rows = isinstance(item, list) and any(isinstance(row, dict) for row in item)
        return "[\n  " + ",\n  ".join(map(json.dumps, item)) + "]" if rows else json.dumps(item)
    with open(path, "w") as file:
        file.write("{" + ",\n ".join(f"{json.dumps(key)}: {text(item)}" for key, item in value.items()) + "}\n")


def read_safetensors(path):
    """name -> (dtype, shape, bytes): 8 bytes of length, a JSON header, the bytes."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()}


# ---- runs
def environment():
    """Of ranks that share few cores."""
    return dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", OMPI_MCA_mpi_yield_when_idle="1",
                OMPI_MCA_btl_vader_single_copy_mechanism="none")


def mpirun(ranks):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "--quiet", "--bind-to", "none", "-n", str(ranks)]


def sets(settings):
    """Keys as arguments of the program."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def run(line, check=True, **more):
    """The output of a command. One that fails ends the script if `check`."""
    done = subprocess.run(line, capture_output=True, text=True, **more)
    if check and done.returncode != 0:
        sys.exit(f"{shlex.join(line)}\nends with {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


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
