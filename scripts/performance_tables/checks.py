# SPDX-License-Identifier: MIT
"""Tables of docs/performance/checks.md and of failures in docs/performance.md."""
from performance_tables.common import link, load, table

CHECKS = ["gpu_check_1gpu.json", "gpu_check_2gpu.json", "gpu_check_4gpu.json"]


def check_runs():
    for name in CHECKS:
        data = load(name)
        for run in data.get("runs", [data]):
            yield name, data["gpus"], run


def gpu_checks():
    rows = []
    for name, gpus, run in check_runs():
        results = [c["result"] for c in run["checks"]]
        rows.append([link(name), run["commit"], gpus, results.count("passed"), results.count("failed"), results.count("not run")])
    return table(["file", "commit", "GPUs", "passed", "failed", "not run"], rows, 2)


def gpu_failures():
    rows = [[c["check"], run["commit"], c["detail"].replace("|", "\\|"), link(name)]
            for name, _, run in check_runs() for c in run["checks"] if c["result"] == "failed"]
    return table(["check", "commit", "what the tool said", "file"], rows, 4)


def checkpoints():
    cpu, gpu = load("io_matrix.json"), load("io_matrix_h200.json")
    rows = [[link("io_matrix.json"), cpu["commit"], cpu["machine"], f"{cpu['held']} of {cpu['of']}", f"`{cpu['command']}`"]]
    rows += [[link("io_matrix_h200.json"), run["commit"], run["machine"], f"{run['held']} of {run['of']}", f"`{run['command']}`"] for run in gpu]
    return table(["file", "commit", "machine", "cells that hold", "command"], rows, 5)


TABLES = {
    "gpu_checks": gpu_checks,
    "gpu_failures": gpu_failures,
    "checkpoints": checkpoints,
}
