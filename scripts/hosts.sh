#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Runs a command of the program on several hosts without a scheduler. First looks at each host over ssh: it answers, has the same program,
# the configuration and this folder under the same names, and a GPU for every rank; what is wrong is said of every host, and nothing starts.
# Usage: hosts.sh HOST:RANKS,HOST:RANKS,... COMMAND CONFIG [arguments of the command]
#   e.g. hosts.sh node1:8,node2:8 train configs/qwen3_30b_a3b.yaml --out /shared/runs/one
#   HOST     consecutive ranks are on one host; the first host is usually this one
#   COMMAND  train, validate, profile or bench (bench has no CONFIG)
# Environment: FP8FLOW_PROGRAM (default: build/cuda-release/fp8flow), FP8FLOW_INTERFACE (network interface that ranks connect over, eth0 for
# one; default: what Open MPI and NCCL find), FP8FLOW_REMOTE_SHELL (default: ssh with keys, no passwords). NCCL_*, OMPI_MCA_*, OMP_*,
# FP8FLOW_* and CUDA_VISIBLE_DEVICES go to every rank as they are here.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
if [[ ${1:-} == -* ]]; then no_arguments "$@"; fi
(($# >= 2)) || die 2 "want HOST:RANKS,... and a command (hosts.sh --help)"
hosts=$1 command=$2
shift 2
[[ $command =~ ^(train|validate|profile|bench)$ ]] || die 2 "command: got '$command', want train, validate, profile or bench"
program=${FP8FLOW_PROGRAM:-$root/build/cuda-release/fp8flow}
[[ -x $program ]] || die 2 "$program is not built: cmake --preset cuda-release && cmake --build build/cuda-release --target fp8flow"
config=''
if [[ $command != bench ]]; then
    config=${1:-}
    [[ -f $config ]] || die 2 "config file not found: '$config'"
fi
read -ra remote_shell <<< "${FP8FLOW_REMOTE_SHELL:-ssh -o BatchMode=yes -o ConnectTimeout=10}"

# ---- what each host has
ranks=0 names=() counts=()
IFS=, read -ra places <<< "$hosts"
for place in "${places[@]}"; do
    [[ $place =~ ^([A-Za-z0-9_][A-Za-z0-9._-]*):([1-9][0-9]*)$ ]] || die 2 "hosts: got '$place', want HOST:RANKS"  # no option of ssh
    names+=("${BASH_REMATCH[1]}") counts+=("${BASH_REMATCH[2]}")
    ranks=$((ranks + BASH_REMATCH[2]))
done
sum_of() { sha256sum < "$1" | cut -c 1-16; }
wanted=$(sum_of "$program")
# One line: sum of the program, whether the folder and the configuration are there, GPUs.
question=$(printf 'sha256sum < %q 2> /dev/null | cut -c 1-16; cd %q 2> /dev/null && test -r %q && echo there || echo missing; ls /dev 2> /dev/null | grep -c "^nvidia[0-9]"; true' \
    "$program" "$PWD" "${config:-.}")
problems=()
for ((i = 0; i < ${#names[@]}; ++i)); do
    host=${names[i]}
    if ! answer=$(timeout 30 "${remote_shell[@]}" "$host" "$question" 2>&1 < /dev/null); then
        problems+=("$host: no answer by '${remote_shell[*]}': $(tail -n 1 <<< "$answer")")
        continue
    fi
    { read -r sum && read -r there && read -r gpus; } <<< "$answer" || sum=
    say "$host: ${counts[i]} ranks, ${gpus:-no} GPUs, program ${sum:-missing}"
    if [[ -z $sum ]]; then problems+=("$host: $program is missing"); fi
    if [[ -n $sum && $sum != "$wanted" ]]; then problems+=("$host: $program is another build ($sum, here $wanted)"); fi
    if [[ $there != there ]]; then problems+=("$host: $PWD${config:+ or $config in it} is missing; hosts need one file system, or the same files"); fi
    if ((gpus > 0 && gpus < counts[i])); then problems+=("$host: ${counts[i]} ranks, but $gpus GPUs"); fi
done
if ((${#problems[@]} > 0)); then
    printf 'error: %s\n' "${problems[@]}" >&2
    exit 2
fi

# ---- the launch
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}  # no NVLink multicast: nothing here needs it, and some machines refuse it
export HWLOC_COMPONENTS=${HWLOC_COMPONENTS:--opencl}  # hwloc's OpenCL plugin loads LLVM, which takes mpirun's signals
export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(usable_cores) / counts[0] > 0 ? $(usable_cores) / counts[0] : 1))}
if [[ -n ${FP8FLOW_INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$FP8FLOW_INTERFACE OMPI_MCA_btl_tcp_if_include=$FP8FLOW_INTERFACE OMPI_MCA_oob_tcp_if_include=$FP8FLOW_INTERFACE
fi
exported=()
while IFS= read -r name; do exported+=(-x "$name"); done < <(compgen -e | grep -E '^(NCCL_|OMP_|OMPI_MCA_|HWLOC_COMPONENTS$|CUDA_VISIBLE_DEVICES$|FP8FLOW_)')
launch=(mpirun -n "$ranks" --host "$hosts" --bind-to none --quiet --mca plm rsh --mca plm_rsh_agent "${remote_shell[*]}" "${exported[@]}"
    "$program" "$command" "$@")
printf '== %q' "${launch[0]}"
printf ' %q' "${launch[@]:1}"
echo
exec "${launch[@]}"
