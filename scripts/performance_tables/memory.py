# SPDX-License-Identifier: MIT
"""Tables of docs/performance/memory.md."""
from performance_tables.common import load, origin, schedule_of, source, table


def state_dtypes():
    """Gradients and moments in BF16: layer, weight gradients, optimizer and step."""
    names, rows = {"profile_state_dtypes_h100_x2.json": "serial",
                   "profile_state_dtypes_ff79989_h100_x2.json": "serial", "profile_state_dtypes_graph_h100_x2.json": "all schedules, graph"}, []
    for name, schedule in names.items():
        profile = load(name)
        for r in profile["recipes"]:
            stages = {s["stage"]: s["seconds"]["median"] * 1e3 for s in r["rows"] if s["direction"] != "forward"}
            rows.append([f"2 x {profile['machine']['device'].split()[1]}, {profile['commit']}", schedule,
                         schedule_of(r, "fp32 state"), f"{r['layer seconds']['median'] * 1e3:.2f}",
                         f"{r['layer clock hertz']['median'] / 1e6:.0f}",
                         f"{stages['fc1 wgrad'] + stages['fc2 wgrad']:.2f}", f"{stages['optimizer']:.2f}",
                         f"{r['step seconds'] * 1e3:.2f}", f"{r['joules per step']:.1f}" if "joules per step" in r else ""])
    return table(["GPUs, commit", "schedule", "state", "layer, ms", "MHz", "weight gradients", "optimizer", "step", "joules a step"], rows, 3) + \
        source(*map(origin, names))


def memory_keys():
    """Rows kept once and room that follows the routing: memory of a layer and time, two GPUs."""
    names = {f"profile_saved_rows_{key}_{gpus}.json": f"{label}, {gpus[:4].upper()}" for gpus in ("h100_x2", "h200_x2") for key, label in
             {"worst_case": "sorted, room for the worst case", "sorted": "sorted", "received": "received", "none": "none"}.items()}
    rows = []
    for name, label in names.items():
        data = load(name)
        r = data["recipes"][0]
        mib = [f"{r[key] / 2**20:.0f}" for key in ("saved bytes used", "saved bytes reserved", "workspace bytes reserved", "activation bytes")]
        rows.append([f"{label}, {data['commit']}", f"{r['routed rows of a layer reserved']}", *mib, f"{r['layer seconds']['median'] * 1e3:.2f}",
                     f"{r['layer clock hertz']['median'] / 1e6:.0f}"])
    return table(["received rows, GPU, commit", "rows reserved", "saved, MiB", "reserved", "workspace reserved", "peak with workspace", "layer, ms", "MHz"],
                 rows) + source(*map(origin, names))


def distributed_optimizer():
    """State divided over two ranks: bytes of a rank, optimizer, gather and step."""
    names, rows = {f"profile_distributed_optimizer_{key}_h100_x2.json": label for key, label in {
        "false": "false", "true": "true", "overlapped": "true, wire beside the layers"}.items()}, []
    for name, label in names.items():
        r = load(name)["recipes"][0]
        held = r["parameter bytes"]
        seconds = {s["stage"]: s["seconds"]["median"] * 1e3 for s in r["rows"]}
        rows.append([label, f"{(held['master'] + held['moments']) / 2**20:.0f}",
                     f"{(held['master'] + held['moments'] + held['main_grad'] + held.get('gathered master', 0)) / 2**20:.0f}",
                     f"{seconds['optimizer']:.2f}", f"{seconds['parameter gather']:.2f}" if "parameter gather" in seconds else "",
                     f"{r['step seconds'] * 1e3:.2f}"])
    return table(["use_distributed_optimizer", "masters, moments, MiB", "with gradients and the gather's buffer", "optimizer, ms", "gather",
                  "step"], rows) + source(*map(origin, names))


def graphs():
    """A step as a CUDA graph: how long it takes, and how long the host is busy."""
    quickstart, larger = "configs/quickstart.yaml, one H100", "configs/h200_100m.yaml, one H100, 4096 tokens"
    names, rows = {"profile_quickstart_graph_h100.json": (quickstart, None),
                   "profile_quickstart_graph_serial_h100.json": (quickstart, "graph"),
                   "profile_quickstart_graph_shared_h100.json": (quickstart, "graph + shared"),
                   "profile_100m_graph_h100.json": (larger, None),
                   "profile_100m_graph_serial_h100.json": (larger, "graph"),
                   "profile_100m_graph_shared_h100.json": (larger, "graph + shared"),
                   "profile_100m_graph_h100_x2.json": ("configs/h200_100m.yaml, two H100s, 4096 tokens a GPU", None)}, []
    for name, (label, schedule) in names.items():
        profile = load(name)
        for r in profile["recipes"]:
            rows.append([label, profile["commit"], schedule or schedule_of(r), f"{r['step seconds'] * 1e3:.2f}",
                         f"{r['host seconds'] * 1e3:.2f}"])
    return table(["model", "commit", "schedule", "step, ms", "host busy, ms"], rows, 3) + source(*map(origin, names))


def gradient_dtypes():
    """Weight gradients of experts alone, by the type of the gradient."""
    name, rows = "bench_gradient_dtypes_h200.json", []
    found = {}
    for r in load(name):
        shape = dict(part.split("=") for part in r["shape"].split())
        found[shape["type"], shape["G"], shape["N"], shape["K"], shape["mode"], shape["dw"]] = r
    for (kind, groups, n, k, mode, dw), r in found.items():
        if dw != "f32":
            continue
        narrow = found[kind, groups, n, k, mode, "bf16"]
        rows.append([kind, groups, f"{n} x {k}", mode, f"{r['us']:.0f}", f"{narrow['us']:.0f}", f"{narrow['us'] / r['us']:.2f}"])
    return table(["operands", "experts", "weight", "mode", "FP32, us", "BF16, us", "ratio"], rows, 4) + source(origin(name))


TABLES = {
    "graphs": graphs,
    "state_dtypes": state_dtypes,
    "memory_keys": memory_keys,
    "distributed_optimizer": distributed_optimizer,
    "gradient_dtypes": gradient_dtypes,
}
