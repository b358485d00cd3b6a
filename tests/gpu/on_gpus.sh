#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Runs a check on the GPUs that ctest grants it (resource "gpus" of the file that scripts/gpu_check.sh writes), or on all visible GPUs where
# ctest has no such file. Exit status 77, which ctest shows as skipped, where fewer than COUNT GPUs are visible.
# Usage: on_gpus.sh COUNT COMMAND [ARGUMENT...]
set -euo pipefail

count=$1
shift
IFS=, read -ra visible <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | paste -sd , || true)}"
if ((${#visible[@]} == 0)); then echo "skipped: no device" && exit 77; fi
if ((${#visible[@]} < count)) && [[ -z ${FP8FLOW_SHARE_GPUS:-} ]]; then echo "skipped: want $count GPUs, ${#visible[@]} visible" && exit 77; fi
devices=''  # each once: ranks may share a GPU
for ((group = 0; group < ${CTEST_RESOURCE_GROUP_COUNT:-0}; ++group)); do
    granted=CTEST_RESOURCE_GROUP_${group}_GPUS  # id:1,slots:1
    granted=${!granted#id:}
    device=${visible[${granted%%,*}]}
    if [[ ,$devices, != *",$device,"* ]]; then devices+=${devices:+,}$device; fi
done
if [[ -n $devices ]]; then export CUDA_VISIBLE_DEVICES=$devices; fi
export OMP_NUM_THREADS=${FP8FLOW_THREADS_PER_GPU:-${OMP_NUM_THREADS:-1}}
export FP8FLOW_GOLDEN=${FP8FLOW_GOLDEN:-require}
exec "$@"
