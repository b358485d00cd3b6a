#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Sets up, builds and trains, from a fresh clone to a trained model.
# Usage: train.sh [-n RANKS] [CONFIG] [arguments for `fp8flow train`]
#   RANKS    MPI ranks (default: $FP8FLOW_RANKS, else 2)
#   CONFIG   default: configs/quickstart.yaml
# The CUDA backend is built only where a GPU is visible and nvcc >= 12.9 works; otherwise the reference backend runs on
# the CPU. OMP_NUM_THREADS and Open MPI's own variables are respected when set.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
ranks=${FP8FLOW_RANKS:-2}
if [[ ${1:-} == -n ]]; then
    (($# >= 2)) || die 2 "-n: number of ranks is missing"
    ranks=$2
    shift 2
fi
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die 2 "ranks: got '$ranks', want a positive number"
config=$root/configs/quickstart.yaml
if (($# > 0)) && [[ $1 != -* ]]; then
    config=$1
    shift
fi
[[ -f $config ]] || die 2 "config file not found: $config"
for argument in "$@"; do  # a misspelt option is found before the build, not after it
    name=${argument%%=*}
    if [[ $name == --* ]] && ! grep -qF "\"$name\"" "$root/model/commands/command_line.cpp"; then no_arguments "$name"; fi
done

"$root/scripts/setup_deps.sh" build

preset=cpu
if gpu_visible; then
    problem=$(cuda_toolkit_problem)
    if [[ -z $problem ]]; then
        preset=cuda-release
    else
        say "a GPU is visible, but $problem: the CUDA backend is not built, the reference backend runs on the CPU"
    fi
fi
configure "$preset"
build "$preset" fp8flow

cores=$(usable_cores)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores >= ranks ? cores / ranks : 1))}
# Containers often forbid reading another process' memory; without it Open MPI copies through shared memory.
export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
export OMPI_MCA_btl_base_warn_component_unused=${OMPI_MCA_btl_base_warn_component_unused:-0}
if (($(id -u) == 0)); then
    say "running as root: telling mpirun that this is intended (OMPI_ALLOW_RUN_AS_ROOT)"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Open MPI counts physical cores and refuses more ranks than that; hardware threads and few cores are fine here.
# --quiet: when a run fails, our own report is the last thing to be read.
command=(mpirun -n "$ranks" --quiet --bind-to none --oversubscribe "$root/build/$preset/fp8flow" train "$config" "$@")
say "OMP_NUM_THREADS=$OMP_NUM_THREADS ${command[*]}"
exec "${command[@]}"
