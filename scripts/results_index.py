#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What each file in docs/results is, and the commits, date, machine and command that it states: the rows of docs/results/README.md, which
make_performance_tables.py writes. A new result needs a line in WHAT, and in MACHINES where it is a text that names no machine. Python's
standard library only.

Usage: results_index.py     prints the rows
"""
import argparse
import json
import re

import check_results

RESULTS = check_results.RESULTS

WHAT = {
    "bench_deepgemm_h200.txt": "grouped FP8 GEMM and DeepGEMM 54e2261 alternating on the same GPUs and buffers",
    "bench_exchange_h200_x2.json": "dispatch and combine on two GPUs",
    "bench_exchange_h200_x2.txt": "the same as the program prints it",
    "bench_exchange_h200_x4.json": "dispatch and combine on four GPUs",
    "bench_exchange_h200_x4.txt": "the same as the program prints it",
    "bench_short_rows_h200_x4.json": "dispatch and combine on two, four and eight GPUs, before and after bundles, smaller work items and progress words",
    "combine_ctas_x4.json": "combine by its number of CTAs and of those that send, two and four GPUs",
    "gemm_waves_h200_x2.json": "GEMMs in one, 4, 8 and 16 waves of CTAs under every schedule, two GPUs",
    "combine_time_stamps_x4.json": "when the stages of a combine and of a dispatch end within the kernel, two and four GPUs",
    "bench_exchange_h200_x8.json": "dispatch and combine on eight GPUs",
    "bench_exchange_h200_x8.txt": "the same as the program prints it",
    "bench_gemm_skeleton_h100.json": "grouped GEMMs before and after the weight gradients got one skeleton, alternating on one GPU",
    "bench_attention_h100.json": "core attention of four models, for plan's calibration",
    "profile_deepseek_v3_h100_x2.json": "DeepSeek-V3 layer of 128 experts on two H100s, three recipes: plan's calibration of the H100",
    "profile_100m_1gpu_h100.json": "configs/h200_100m.yaml on one H100: plan's cost of a launch there",
    "profile_deepseek_v3_2gpu_hosts_alltoall_h100.json": "two H100s as two hosts: dispatch and combine over NCCL, messages of the size that routing makes",
    "profile_deepseek_v3_2gpu_hosts_fixed_h100.json": "the same, messages of a fixed size: the host waits for nothing",
    "profile_deepseek_v3_2gpu_hosts_two_levels_h100.json": "the same by two levels of exchange",
    "bench_kernels_in_parts_h200.json": "norm, weight, plan and router kernels before and after their functions were split, alternating on one GPU",
    "bench_gemm_h200.json": "grouped GEMM and cuBLASLt, errors against double; kernels of that commit, faster since",
    "bench_model_h200.json": "every operation of four whole models at its shape",
    "compare_torch_families.txt": "MoE layers of every family that --hf-config reads, against transformers' blocks in float64",
    "compare_training_cpu.json": "a small Qwen3-MoE and a small Mixtral trained here and in PyTorch: losses, gradients of step one",
    "gemm_steps_h200.txt": "examples/gemm_steps and the program's FP8 grouped GEMM",
    "python_package_h200.txt": "the Python package on a GPU: tests, the layer's time, the example (no figures of accuracy: one seed)",
    "python_package_cpu.txt": "the Python package installed and tested on CPU tensors, and its example (no figures of accuracy: one seed)",
    "profile_deepseek_v3_4gpu_schedules.json": "DeepSeek-V3 layer, 4 GPUs, schedules side by side; squares of gradients in double",
    "profile_deepseek_v3_4gpu_micro_batches.json": "the same with eight micro-batches a step",
    "profile_deepseek_v3_4gpu_8192_schedules.json": "the same with 8192 tokens a GPU",
    "profile_deepseek_v3_4gpu_state_dtypes.json": "the same, every schedule and a CUDA graph a step, gradients and moments in FP32 and BF16",
    "profile_deepseek_v3_4gpu_beside.json": "the schedules with squares in FP32; weight gradients begin once combine is on the wire",
    "profile_deepseek_v3_4gpu_beside_micro_batches.json": "the same with eight micro-batches a step",
    "profile_deepseek_v3_4gpu_latest.json": "the schedules at 03f5857",
    "profile_deepseek_v3_4gpu_recipes.json": "DeepSeek-V3 layer, 4 GPUs, three recipes: plan's calibration of the H200",
    "profile_deepseek_v3_4gpu_hosts_inside.json": "four GPUs as two hosts of two: EP 2 inside a host, DP 2 over NCCL",
    "profile_deepseek_v3_4gpu_hosts_across.json": "four GPUs as two hosts of two: EP 4 across them, over NCCL",
    "profile_deepseek_v3_4gpu_hosts_fixed.json": "the same, messages of a fixed size",
    "profile_deepseek_v3_4gpu_hosts_two_levels.json": "the same by two levels of exchange",
    "profile_qwen3_235b_a22b_4gpu.json": "Qwen3-235B layer, 4 GPUs, three recipes",
    "profile_qwen3_30b_a3b_4gpu.json": "Qwen3-30B layer, 4 GPUs, three recipes",
    "profile_mixtral_8x7b_4gpu.json": "Mixtral layer, 4 GPUs, three recipes",
    "profile_deepseek_v2_lite_4gpu.json": "DeepSeek-V2-Lite layer, 4 GPUs, three recipes",
    "profile_100m_4gpu_schedules.json": "configs/h200_100m.yaml, EP 4 on four GPUs, schedules side by side",
    "profile_deepseek_v3_8gpu_schedules.json": "DeepSeek-V3 layer, 8 GPUs (EP 8), schedules side by side",
    "profile_deepseek_v3_4gpu_beside_8gpu.json": "the layer on four of those GPUs (EP 4), in the same call",
    "profile_deepseek_v3_8gpu_micro_batches.json": "EP 8 with eight micro-batches a step",
    "profile_deepseek_v3_8gpu_8192_schedules.json": "EP 8 with 8192 tokens a GPU",
    "profile_deepseek_v3_8gpu_state_dtypes.json": "EP 8, every schedule and a CUDA graph a step, gradients and moments in FP32 and BF16",
    "profile_deepseek_v3_8gpu_hosts_inside.json": "eight GPUs as two hosts of four: EP 4 inside a host, DP 2 over NCCL",
    "profile_deepseek_v3_8gpu_hosts_across.json": "eight GPUs as two hosts of four: EP 8 across them, over NCCL",
    "profile_deepseek_v3_8gpu_hosts_fixed.json": "the same on other GPUs, messages of a fixed size",
    "profile_deepseek_v3_8gpu_hosts_two_levels.json": "the same by two levels: NCCL between the hosts, peer memory inside",
    "profile_sockets_2gpu_routed.json": "two GPUs as two hosts over sockets (NCCL's peer-to-peer and shared memory off), a small layer",
    "profile_sockets_2gpu_fixed.json": "the same, messages of a fixed size",
    "profile_100m_8gpu_state_whole.json": "configs/h200_100m.yaml, EP 4 x DP 2 on eight GPUs, whole state",
    "profile_100m_8gpu_state_divided.json": "the same, masters and moments divided over the ranks",
    "profile_100m_8gpu_state_divided_overlapped.json": "the same, the wire of the divided state beside the layers",
    "profile_100m_4gpu_state_whole.json": "configs/h200_100m.yaml, EP 2 x DP 2 on four GPUs, whole state",
    "profile_100m_4gpu_state_divided.json": "the same, masters and moments divided over the ranks",
    "profile_100m_4gpu_state_divided_overlapped.json": "the same, the wire of the divided state beside the layers",
    "scale_check_h200_x8.json": "scripts/scale_check.sh on eight GPUs: layers, wire, bits, whole model, divided state, hosts; records failures",
    "scale_check_shared_h200_x2.json": "scripts/scale_check.sh --share: bits and two levels with 8 and 16 ranks on two GPUs",
    "scale_check_h200_x4.json": "scripts/scale_check.sh on four GPUs: layers, wire, bits, whole model, divided state, faults; records failures",
    "faults_h200_x4.json": "a rank killed, stopped and throwing, four GPUs",
    "exposed_deepseek_v3_2gpu.json": "exposed wire of each schedule, DeepSeek-V3 layer",
    "exposed_deepseek_v3_2gpu.svg": "its lanes in time",
    "exposed_deepseek_v3_2gpu_micro_batches.json": "the same, 8 micro-batches",
    "exposed_deepseek_v3_2gpu_micro_batches.svg": "its lanes in time",
    "exposed_deepseek_v3_2gpu_skewed_1_25.json": "the same, one micro-batch, the fullest expert 1.25 of the mean",
    "exposed_deepseek_v3_2gpu_skewed_2.json": "the same, the fullest expert 2.0 of the mean",
    "exposed_mixtral_2gpu.json": "the same, Mixtral-8x7B layer",
    "exposed_100m_2gpu.json": "the same, 107 M model",
    "exposed_100m_2gpu.svg": "its lanes in time",
    "exposed_deepseek_v3_4gpu.json": "exposed wire of each schedule, DeepSeek-V3 layer on four GPUs, and how long calls have nothing beside them",
    "exposed_deepseek_v3_4gpu.svg": "its lanes in time",
    "exposed_deepseek_v3_4gpu_micro_batches.json": "the same, 8 micro-batches",
    "exposed_deepseek_v3_4gpu_micro_batches.svg": "its lanes in time",
    "exposed_deepseek_v3_4gpu_bf16_gradients.json": "the same, one micro-batch, gradients in BF16",
    "exposed_100m_4gpu.json": "the same, 107 M model, EP 4",
    "profile_100m_graph_h100_x2.json": "configs/h200_100m.yaml on two H100s, schedules side by side, one of them a CUDA graph a step",
    "profile_quickstart_graph_h100.json": "configs/quickstart.yaml on one H100, likewise",
    "profile_quickstart_graph_serial_h100.json": "the graph with parameters' steps beside each other",
    "profile_quickstart_graph_shared_h100.json": "the same with the shared expert beside",
    "profile_100m_graph_h100.json": "configs/h200_100m.yaml on one H100, schedules side by side, one of them a CUDA graph a step",
    "profile_100m_graph_serial_h100.json": "the graph with parameters' steps beside each other",
    "profile_100m_graph_shared_h100.json": "the same with the shared expert beside",
    "profile_state_dtypes_h100_x2.json": "gradients and moments in FP32 and BF16 on two H100s, squares summed by the weight gradients",
    "profile_state_dtypes_ff79989_h100_x2.json": "the same layer at ff79989, in the same call as the next",
    "profile_state_dtypes_graph_h100_x2.json": "the same, every schedule and a CUDA graph a step",
    "profile_saved_rows_worst_case_h100_x2.json": "a layer with moe_expert recompute, room for the worst routing, before the backward's halves shared scratch; these four: before chunks were joined",
    "profile_saved_rows_sorted_h100_x2.json": "the same since, room that follows the routing, in the same call as the next two",
    "profile_saved_rows_received_h100_x2.json": "received rows kept once per (token, rank)",
    "profile_saved_rows_none_h100_x2.json": "rows dispatched again in the backward",
    "profile_saved_rows_worst_case_h200_x2.json": "the same on two H200s, chunks of memory joined: room for the worst routing",
    "profile_saved_rows_sorted_h200_x2.json": "room that follows the routing",
    "profile_saved_rows_received_h200_x2.json": "received rows kept once per (token, rank)",
    "profile_saved_rows_none_h200_x2.json": "rows dispatched again in the backward",
    "profile_distributed_optimizer_false_h100_x2.json": "configs/h200_100m.yaml, data parallel 2, whole state, in the same call as the next",
    "profile_distributed_optimizer_true_h100_x2.json": "the same, masters and moments divided over the ranks",
    "profile_distributed_optimizer_overlapped_h100_x2.json": "the same, the wire of the divided state beside the layers",
    "validate_state_dtypes_seeds_h100_x2.txt": "the same comparison with seeds 2 and 3, as the program prints it",
    "validate_control_seeds_h200_x2.txt": "the control arm of bf16 with seeds 2 and 3, as the program prints it",
    "validate_state_dtypes_h100_x2.json": "1,000 steps of configs/h200_100m.yaml: gradients and moments in BF16 against FP32, one seed",
    "faults_h100_x2.json": "a rank killed, stopped and throwing at ten stages, two GPUs",
    "profile_state_dtypes_2gpu.json": "a DeepSeek-V3 layer with 128 experts on two GPUs, gradients and moments in FP32 and BF16",
    "bench_gradient_dtypes_h200.json": "weight gradients of experts, written and added in FP32 and in BF16",
    "planted_cpu.json": "small mistakes planted one at a time: which test catches each",
    "planted_added_cpu.json": "mistakes added since: order invariant, rows kept once, room for rows, divided state",
    "planted_h200.json": "the same in GPU kernels",
    "host_checks.json": "the tests of the reference backend under AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer",
    "folder_fights.json": "two runs with one folder, and runs killed at random and resumed",
    "faults_cpu.json": "a rank lost at every stage of a run, in four ways, 2 and 4 CPU ranks",
    "faults_throwing_cpu.json": "an exception thrown in a rank at every stage, 1, 2 and 4 CPU ranks",
    "faults_8_ranks_cpu.json": "a rank lost at every stage of a run, in five ways, 8 CPU ranks",
    "faults_h200_x2.json": "the same as faults_cpu.json on two GPUs, killed and stopped",
    "bench_heads_h200.json": "the heads of attention, one pass each way",
    "bench_layer_h200.json": "every operation at the sizes of the DeepSeek-V3 layer; kernels of that commit",
    "bench_products_h200.txt": "grouped GEMM, wgrad and the fused fc1, two sittings",
    "bench_upstream_h200.json": "every shape of the upstream suite; `rms_norm_backward` rows from a second commit",
    "bench_upstream_h200.svg": "share of the ceiling by operation, drawn from the file above",
    "bench_upstream_h200.txt": "the same as the program prints it",
    "fuzz.txt": "libFuzzer runs of every reader of outside files",
    "gpu_check_1gpu.json": "sanitizers and tests on one GPU; records a failure",
    "gpu_check_2gpu.json": "checks on two GPUs; records a failure",
    "gpu_check_4gpu.json": "checks on four GPUs; records a failure",
    "io_errors.txt": "errors of one MoE layer against float64 and PyTorch implementations",
    "io_matrix.json": "runs killed and resumed, reference backend: bit for bit",
    "io_matrix_h200.json": "the same on GPUs",
    "kernel_profile_h200.txt": "Nsight Compute on kernels of the upstream suite",
    "peers_layers_h200.json": "whole MoE layers of other implementations and of ff79989 on one GPU",
    "peers_torch_h200.jsonl": "what PyTorch takes for the shapes of the upstream suite",
    "profile_100m_1gpu.json": "configs/h200_100m.yaml on one GPU, schedules side by side",
    "profile_100m_1gpu_before.json": "the same at ff79989, in the same call",
    "profile_100m_2gpu.json": "configs/h200_100m.yaml on two GPUs, schedules side by side",
    "profile_100m_2gpu_before.json": "the same at ff79989, in the same call",
    "profile_100m_2gpu_micro_batches.json": "the same with four micro-batches a step",
    "profile_deepseek_v3_2gpu_schedules.json": "a DeepSeek-V3 layer with 128 experts on two GPUs, schedules side by side",
    "profile_deepseek_v3_2gpu_before.json": "the same at ff79989, in the same call",
    "profile_deepseek_v3_2gpu_micro_batches.json": "the same with eight micro-batches a step",
    "profile_qwen3_235b_2gpu_schedules.json": "a Qwen3-235B layer on two GPUs, schedules side by side",
    "profile_deepseek_v3.json": "DeepSeek-V3 layer, 4 GPUs, every stage under three recipes",
    "profile_deepseek_v3.svg": "its picture",
    "profile_deepseek_v3_1gpu.json": "DeepSeek-V3 dimensions with 32 experts, one GPU",
    "profile_deepseek_v3_1gpu.svg": "its picture",
    "profile_deepseek_v3_1gpu_delay_false.json": "the same, two micro-batches, wgrad at once",
    "profile_deepseek_v3_1gpu_delay_true.json": "the same, wgrad of two micro-batches in one pass",
    "profile_deepseek_v3_1gpu_before.json": "the layer at ff79989, in the same call as the next",
    "profile_deepseek_v3_1gpu_schedules.json": "its schedules side by side",
    "profile_deepseek_v3_8192.json": "DeepSeek-V3 layer, 4 GPUs, 8192 tokens a GPU",
    "profile_deepseek_v3_8192.svg": "its picture",
    "profile_deepseek_v3_machine2.json": "DeepSeek-V3 layer, 4 GPUs, another machine",
    "profile_mixtral_8x7b.json": "Mixtral-8x7B layer, 4 GPUs",
    "profile_mixtral_8x7b.svg": "its picture",
    "profile_qwen3_1gpu.json": "Qwen3 dimensions with 32 experts, one GPU",
    "profile_qwen3_1gpu.svg": "its picture",
    "profile_qwen3_235b.json": "Qwen3-235B layer, 4 GPUs",
    "profile_qwen3_235b.svg": "its picture",
    "quickstart_ablation.json": "the flow with one switch off at a time, and the control arm, two GPUs",
    "quickstart_recipes.json": "loss under every recipe and the control arm, reference backend",
    "quickstart_recipes.svg": "its picture",
    "quickstart_recipes_h200.json": "the same on one GPU",
    "quickstart_combine_h200.json": "the same with precision.moe_apply_probs_in: combine",
    "transposed_quickstart_cpu.json": "what the transposed copies of fp8_flow flush while configs/quickstart.yaml trains, reference backend",
    "validate_100m_1gpu.json": "loss of configs/h200_100m.yaml under bf16, fp8_flow and the control arm, one GPU: inconclusive",
    "validate_h200_100m.json": "loss of configs/h200_100m.yaml under bf16, fp8_flow and the control arm, 4 GPUs",
    "validate_h200_100m.svg": "its picture",
}


MACHINES = {  # of text files
    "bench_deepgemm_h200.txt": "NVIDIA H200s, three machines", "bench_products_h200.txt": "NVIDIA H200",
    "compare_torch_families.txt": "2 CPU cores", "fuzz.txt": "2 CPU cores", "gemm_steps_h200.txt": "NVIDIA H200",
    "python_package_h200.txt": "NVIDIA H200", "python_package_cpu.txt": "2 CPU cores", "io_errors.txt": "2 CPU cores; NVIDIA H200s",
    "kernel_profile_h200.txt": "NVIDIA H200", "validate_state_dtypes_seeds_h100_x2.txt": "2 x NVIDIA H100 80GB HBM3",
    "validate_control_seeds_h200_x2.txt": "2 x NVIDIA H200",
}


def said_by(name):
    """(commits, date, machine, command) as the file says them."""
    path = RESULTS / name
    if path.suffix == ".svg":
        return "", "", "", f"made with {path.stem}.json"
    if path.suffix == ".json":
        data = json.loads(path.read_text())
        items = data if isinstance(data, list) else data.get("runs", [data])
        top = {} if isinstance(data, list) else data

        def all_of(key):
            values = []
            for item in items:
                value = item.get(key, top.get(key))
                if value and value not in values:
                    values.append(value)
            return values
        machines = [check_results.machine_of({"machine": v}) for v in all_of("gpu") + all_of("machine")]
        count = top.get("gpus") or top.get("ranks") if "gpu" in top or "device" in top.get("machine", "") else \
            items[0].get("gpus")
        machine = machines[0]
        if count and count > 1 and not re.match(r"\d", machine):
            machine = f"{count} x {machine}"
        commands = all_of("command")
        command = f"`{commands[0]}`" + (f" and {len(commands) - 1} more in the file" if len(commands) > 1 else "")
        return ", ".join(all_of("commit")), all_of("date")[0][:10], machine, command
    text = path.read_text()
    commits = list(dict.fromkeys(re.findall(r"commits?:? ([0-9a-f]{7})\b", text)))[:4]
    dates = re.findall(r"20\d\d-\d\d-\d\d", text)
    command = re.search(r"^[$#] ?((?:\./)?(?:scripts/|fp8flow|fuzz_)[^\n]*)", text, re.M)
    twin = path.with_suffix(".json")
    if twin.exists() and path.stem.startswith("bench_"):
        return "", "", "", f"made with {twin.name}"
    if path.suffix == ".jsonl":
        return "", "", "NVIDIA H200", "`scripts/peers_torch.py > peers.jsonl`; the file itself says torch's version only"
    machine = MACHINES[name]
    said = command[1].strip() if command else ""
    said = re.split(r" {3,}", said)[0]
    return ", ".join(commits), dates[0] if dates else "", machine, f"`{said}`" if said else "in the file"


def rows():
    """A list of cells a file: link, what it is, commits, date, machine, command."""
    there = {p.name for p in RESULTS.iterdir() if p.name != "README.md"}
    assert there == set(WHAT), (sorted(there - set(WHAT)), sorted(set(WHAT) - there))
    return [[f"[{name}]({name})", WHAT[name], *(cell.replace("|", "\\|") for cell in said_by(name))] for name in sorted(WHAT)]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for row in rows():
        print(*row, sep=" | ")
