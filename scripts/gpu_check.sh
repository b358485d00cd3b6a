#!/usr/bin/env bash
# On a machine with Hopper GPUs, in one call: builds, runs every GPU test, compute-sanitizer over the parity tests, and short train and
# validate runs on 1, 2, ... GPUs. Prints one table and writes gpu_check.json. Installs nothing.
# Usage: gpu_check.sh [FOLDER for logs and gpu_check.json; default runs/gpu_check]
set -uo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out=${1:-$root/runs/gpu_check}
mkdir -p "$out"
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | wc -l)
((gpus > 0)) || die 2 "no GPU is visible here"
problem=$(cuda_toolkit_problem)
[[ -z $problem ]] || die 2 "the CUDA backend cannot be built: $problem"
export OMPI_MCA_btl_vader_single_copy_mechanism=none
if (($(id -u) == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

configure cuda-release && build cuda-release || exit
bin=$root/build/cuda-release
rows=() failed=0
record() {  # record NAME RESULT SECONDS DETAIL
    rows+=("{\"check\": \"$1\", \"result\": \"$2\", \"seconds\": $3, \"detail\": \"$4\"}")
    printf '%-34s %-8s %6s s  %s\n' "$1" "$2" "$3" "$4"
    [[ $2 != failed ]] || failed=1
}
# check NAME SECONDS COMMAND...: the detail is the last line that matches $pattern.
check() {
    local name=$1 limit=$2 log start=$SECONDS result=passed detail
    shift 2
    log=$out/${name// /_}.log
    timeout "$limit" "$@" > "$log" 2>&1 || result=failed
    detail=$(grep -E "$pattern" "$log" | tail -n 1 | tr -d '"\\' | sed 's/^ *//')
    record "$name" "$result" $((SECONDS - start)) "${detail:0:110}"
}

pattern='\[  (PASSED|FAILED)  \]'
for test in "$bin"/tests/gpu_*_test; do check "$(basename "$test")" 300 "$test"; done
pattern='ERROR SUMMARY'
for test in "$bin"/tests/gpu_*_parity_test; do
    name="memcheck $(basename "$test")"
    if command -v compute-sanitizer > /dev/null; then
        check "$name" 300 compute-sanitizer --tool memcheck --error-exitcode 1 "$test" --gtest_brief=1
    else
        record "$name" "not run" 0 "compute-sanitizer is not here"
    fi
done
pattern='held-out loss|verdict:'
quickstart=("$root/configs/quickstart.yaml" --backend hopper --set output.log_interval=50)
one=(--set parallel.expert_model_parallel_size=1 --set training.micro_batch_size=16)
check "train on 1 GPU" 200 "$bin/fp8flow" train "${quickstart[@]}" "${one[@]}" --out "$out/train1"
for ranks in 2 4; do
    ((ranks <= gpus)) || continue
    check "train on $ranks GPUs" 200 mpirun -n $ranks --quiet --bind-to none --oversubscribe "$bin/fp8flow" train "${quickstart[@]}" \
        --set parallel.expert_model_parallel_size=$ranks --set training.micro_batch_size=$((16 / ranks)) --out "$out/train$ranks"
done
check "validate on 1 GPU" 300 "$bin/fp8flow" validate "${quickstart[@]}" "${one[@]}" --out "$out/validate1" \
    --set "validate.recipes=[bf16,fp8_tensorwise,fp8_blockwise,fp8_flow,fp8_rowwise,mxfp8]"

{
    printf '{\n  "command": "./scripts/gpu_check.sh", "date": "%s", "commit": "%s",\n' "$(date +%F)" \
        "$(git -C "$root" rev-parse --short HEAD 2> /dev/null || echo unknown)"
    printf '  "gpu": "%s", "gpus": %d,\n  "checks": [\n' "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)" "$gpus"
    (IFS=$'\n'; echo "${rows[*]}") | sed 's/^/    /; $!s/$/,/'
    printf '  ]\n}\n'
} > "$out/gpu_check.json"
say "written: $out/gpu_check.json"
exit $failed
