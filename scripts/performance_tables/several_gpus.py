# SPDX-License-Identifier: MIT
"""Tables of docs/performance/several_gpus.md."""
from performance_tables.common import link, load, origin, source, table

TWO_HOSTS = [("messages as routed", "profile_deepseek_v3_2gpu_hosts_alltoall_h100.json"),
             ("messages of a fixed size", "profile_deepseek_v3_2gpu_hosts_fixed_h100.json"),
             ("two levels", "profile_deepseek_v3_2gpu_hosts_two_levels_h100.json")]


def hosts_2gpu():
    """Two GPUs as two hosts: how rows cross, and how often the host waits."""
    rows = []
    for label, name in TWO_HOSTS:
        r = load(name)["recipes"][0]
        rows.append([label, f"{r['layer seconds']['median'] * 1e3:.2f}", f"{r['layer clock hertz']['median'] / 1e6:.0f}",
                     f"{r['exposed wire seconds'] * 1e3:.2f}", f"{r['exposed wire seconds between hosts'] * 1e3:.2f}",
                     f"{r['wire bytes']['between hosts'] / 2**20:.1f}", f"{r['host stops per step']:g}", f"{r['step seconds'] * 1e3:.2f}",
                     f"{r['host seconds'] * 1e3:.2f}"])
    return table(["rows cross hosts as", "layer, ms", "MHz", "exposed, ms", "of which between hosts", "MiB between hosts a step",
                  "host stops a step", "step, ms", "host busy, ms"], rows) + source(*(origin(name) for _, name in TWO_HOSTS))


def scale_checks(name):
    """What scale_check.sh found, each check as it was last run."""
    data, rows = load(name), {}
    for run in data["runs"]:
        for c in run["checks"]:
            if c["result"] != "not run" or c["check"] not in rows:
                figures = c.get("figures") if c["check"].startswith("train") else None
                said = ", ".join(f"{key} {value}" for key, value in figures.items()) if figures else c["detail"]
                where = run.get("commit", data["commit"]) + (f", {run['gpu'].split()[1]}" if "gpu" in run else "")
                rows[c["check"]] = [c["check"], c["result"], c["seconds"] if c["result"] != "not run" else "", where, said.replace("|", "\\|")]
    kept = [row for name, row in rows.items() if not name.startswith(("layer", "state", "model", "exchange")) or row[1] != "passed"]
    last = data["runs"][-1]
    return table(["check", "result", "s", "commit", "what it said"], kept, 5) + source(
        f"{link(name)}, {last['date']}, `{last['command']}` and {len(data['runs']) - 1} more in the file")


def hosts_sockets():
    """Two GPUs as two hosts over sockets: what dispatch and combine reach of what NCCL does alone."""
    names, rows = {"profile_sockets_2gpu_routed.json": "as routed", "profile_sockets_2gpu_fixed.json": "of a fixed size"}, []
    for name, label in names.items():
        r = load(name)["recipes"][0]
        raw = float(r["exchange"].split("median ")[1].split()[0]) * 1e9
        for row in r["rows"]:
            if row["stage"] in ("dispatch", "combine"):
                rate = row["wire bytes"] / row["seconds"]["median"]
                rows.append([label, f"{row['stage']}, {row['direction']}", f"{row['wire bytes'] / 2**20:.1f}", f"{row['seconds']['median'] * 1e3:.2f}",
                             f"{rate * 1e-9:.2f}", f"{raw * 1e-9:.2f}", f"{rate / raw * 100:.0f} %", f"{r['host stops per step']:g}"])
    return table(["messages", "call", "MiB each way", "ms", "GB/s", "NCCL alone, 16 MiB", "share", "host stops a step"], rows, 2) + \
        source(*map(origin, names))


TABLES = {
    "scale_checks": lambda: scale_checks("scale_check_h200_x4.json"),
    "scale_checks_8gpu": lambda: scale_checks("scale_check_h200_x8.json"),
    "scale_checks_shared": lambda: scale_checks("scale_check_shared_h200_x2.json"),
    "hosts_2gpu": hosts_2gpu,
    "hosts_sockets": hosts_sockets,
}
