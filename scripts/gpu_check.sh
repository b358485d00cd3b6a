#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# On a machine with Hopper GPUs, in one call: builds, then runs every GPU test on one GPU and on several, short training, validation and
# measuring runs on 1, 2, 4, 8 GPUs, and compute-sanitizer over every operation. Small checks run side by side on all GPUs. Prints one table
# and writes gpu_check.json; exit status 1 if a check failed. Installs nothing (dependencies: scripts/setup_deps.sh, fetch_deps.sh).
# Usage: gpu_check.sh [--budget SECONDS] [--resume FILE] [--only REGEX] [--skip REGEX] [FOLDER]
#   --budget  no check starts later than this after the start, build included; what no longer fits is "not run"
#   --resume  results are kept in FILE as they come; checks that passed there on the same sources and kind of GPU are not run again, so that
#             calls with the same FILE, e.g. of --budget 560, together do all; gpu_check.json lists those of earlier calls as well
#   --only    only checks whose name matches, e.g. --only gemm, --only '^memcheck'
#   --skip    without checks whose name matches; --skip sanitizers stands for all runs under compute-sanitizer
#   FOLDER    for logs and gpu_check.json; default runs/gpu_check
# The golden runs of the GPUs are compared with tests/golden/hopper.json; to take that file anew:
#   FP8FLOW_GOLDEN=write ./scripts/gpu_check.sh --only 'golden_test hashes'
set -uo pipefail
shopt -s globstar
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/check_queue.sh
source "$root/scripts/check_queue.sh"

command="./scripts/gpu_check.sh${*:+ $*}"
out=$root/runs/gpu_check
read_arguments budget resume only skip -- "$@"
tools=(memcheck initcheck racecheck synccheck)
if [[ $skip == sanitizers ]]; then skip="^($(IFS='|' && echo "${tools[*]}")) "; fi

prepare_checks
find_gpus
gpus=${#gpu_ids[@]}
((gpus > 0)) || die 2 "no GPU is visible here"
require_cuda_toolkit
rank_counts=()
for ranks in 1 2 4 8; do if ((ranks <= gpus)); then rank_counts+=("$ranks"); fi; done

# tests_of FOLDER: the executables of tests/FOLDER of which a check is wanted; those that take longest first, so that they do not end last
tests_of() {
    local file test name ranks names=()
    for file in "$root/tests/$1"/**/*{quantize,gemm,permute,token}*_test.{cpp,cu} "$root/tests/$1"/**/*_test.{cpp,cu}; do
        if [[ -f $file ]]; then names+=("$1_$(basename "${file%.*}")"); fi
    done
    for test in $(printf '%s\n' "${names[@]}" | awk '!seen[$0]++'); do
        mapfile -t names < <(for ranks in "${rank_counts[@]}"; do parts_of "$test" | sed "s/^/$test/; s/|.*/ on $ranks/"; done)
        for name in "$test" "${names[@]}" "${tools[@]/%/ $test}"; do
            if wanted "$name"; then echo "$test" && break; fi
        done
    done
}
# parts_of TEST: what of it is a check of its own, as lines "SUFFIX|FILTER|ENVIRONMENT"; most tests are one check.
parts_of() {
    if [[ $1 == gpu_mpi_golden_test ]]; then
        echo ' hashes|Golden.Hopper'
        echo ' alltoall is flex|Golden.AlltoallIsFlex'
        echo ' recompute modes|Golden.RecomputeChangesNoBit'
        echo ' flow switches|Golden.SwitchesOfTheFlow'
        echo ' saved rows|Golden.SavedRowsChangeNoBit'
        echo ' schedules|Golden.SchedulesChangeNoBit'
        echo ' graphs|Golden.GraphsChangeNoBit'
        echo ' divided state|Golden.DividedState*'
        echo ' order invariant|Golden.InvariantOrderChangesNoBit'
        echo ' hosts|Golden.HostsChangeNoBit'
        echo ' two levels|Golden.TwoLevelsChangeNoBit'
        echo ' delays|Golden.NoDelayChangesABit'
    elif [[ $1 == gpu_mpi_exchange_gpu_test ]]; then
        parts_of_exchange
    else
        echo '|*'
    fi
}
mapfile -t gpu_tests < <(tests_of gpu)
mapfile -t mpi_tests < <(tests_of gpu_mpi)
configure cuda-release && build cuda-release fp8flow fp8flow_shared "${gpu_tests[@]}" "${mpi_tests[@]}" || exit
bin=$root/build/cuda-release
export FP8FLOW_GOLDEN=${FP8FLOW_GOLDEN:-require}

# ---- the checks, the most telling first -----------------------------------------------------------------------------------------------
# train_twice RANKS OUT ARGUMENTS...: trains twice with the same seed; the losses and gradient norms of all iterations have to be the same bits.
# shellcheck disable=SC2317  # called by the check of that name
train_twice() {
    local out=$2 ranks=$1 turn
    shift 2
    for turn in first second; do
        mpirun -n "$ranks" --quiet --bind-to none --oversubscribe "$bin/fp8flow" train "$@" --out "$out/$turn" --overwrite || return
        grep -oE '"(iteration|lm_loss|grad_norm)":[^,}]*' "$out/$turn/metrics.jsonl" > "$out/$turn.txt" || return
    done
    cmp "$out/first.txt" "$out/second.txt" && echo "the same bits twice: $(grep -c lm_loss "$out/first.txt") iterations"
}
export -f train_twice
export bin

has_command() { "$bin/fp8flow" --help | grep -qE "^ +$1 "; }

test_line='\[  (PASSED|FAILED)  \]|skipped'
# place TEST: sets `place`. Tests that look at times or at a GPU's free memory have it to themselves.
place() {
    place=()
    if [[ $1 =~ _(measure|stage_timer|peer_exchange|out_of_memory)_ ]]; then place=(--gpus 1); fi
}
for test in "${gpu_tests[@]}"; do
    place "$test"
    add "${place[@]}" --detail "$test_line" "$test" "$bin/tests/$test"
done

for ranks in "${rank_counts[@]}"; do
    on_ranks "$ranks"
    for test in "${mpi_tests[@]}"; do
        while IFS='|' read -r part filter environment; do
            if [[ $part == ' hashes' && $ranks == 8 ]]; then continue; fi  # the committed file has jobs of 1, 2 and 4 ranks
            add --gpus "$ranks" --detail "$test_line" "$test$part on $ranks" env ${environment:+"$environment"} "${run[@]}" "$bin/tests/$test" \
                "--gtest_filter=$filter"
        done < <(parts_of "$test")
    done
    split=(--set "parallel.expert_model_parallel_size=$ranks" --set "training.micro_batch_size=$((16 / ranks))")
    quickstart=("$root/configs/quickstart.yaml" --backend hopper --set output.log_interval=50 "${split[@]}")
    add --gpus "$ranks" --detail 'held-out loss' "train on $ranks" "${run[@]}" "$bin/fp8flow" train "${quickstart[@]}" \
        --out "$out/train$ranks" --overwrite
    if ((ranks == rank_counts[-1])); then
        add --gpus "$ranks" --detail 'same bits|differ' "train twice on $ranks" bash -c 'train_twice "$@"' _ "$ranks" "$out/twice" \
            "${quickstart[@]}" --set training.train_iters=1000 --set training.eval_iters=0
        rm -f "$out/validate$ranks/validate.json" # its errors would be taken for those of this call
        add --gpus "$ranks" --detail 'verdict:' --figures "errors_of_validate '$out/validate$ranks/validate.json'" \
            "validate on $ranks" "${run[@]}" "$bin/fp8flow" validate "${quickstart[@]}" \
            --out "$out/validate$ranks" --overwrite --set validate.max_relative_loss_error=0.0025 --set 'validate.recipes=[bf16,fp8_tensorwise,fp8_blockwise,fp8_flow,fp8_rowwise,mxfp8]'
    fi
    if has_command profile; then
        add --gpus "$ranks" "profile on $ranks" "${run[@]}" "$bin/fp8flow" profile "$root/configs/layer_qwen3_30b_a3b.yaml" \
            --steps 3 --recipes bf16,fp8_flow --backend hopper --out "$out/profile$ranks" --overwrite --set "parallel.expert_model_parallel_size=$ranks" \
            --set "training.global_batch_size=$ranks" --set model.seq_length=1024 --set profile.energy_seconds=0
    fi
done
if has_command validate; then  # docs/usage/new_recipe.md, on the GPU
    add --gpus 1 --detail 'rows_of_128|rror' recipe bash -c 'g++ -std=c++20 -O2 -shared -fPIC -I "$1/include" -I "$1" \
        "$1/examples/custom_recipe.cpp" -o "$2.so" && "$3/fp8flow" validate "$1/configs/test.yaml" --backend hopper --plugin "$2.so" \
        --set "validate.recipes=[bf16,fp8_blockwise]" --set validate.max_relative_loss_error=0.01 --out "$2" --overwrite | \
        grep -E "rows_of_128 .* pass"' _ "$root" "$out/recipe" "$bin"
fi
add --gpus 1 --detail 'passed|failed|has no' python "$root/scripts/test_python.sh" --library "$bin/libfp8flow.so"
if has_command bench; then
    add --gpus 1 --detail 'mine|rror' plugin bash -c 'nvcc -O3 -arch=sm_90a -shared -Xcompiler -fPIC -I "$1/include" \
        "$1/examples/bench_plugin.cu" -o "$2.so" && "$bin/fp8flow" bench add --backend hopper --plugin "$2.so" | grep -E "mine \(equal\)"' \
        _ "$root" "$out/bench_plugin"
    add --gpus 1 bench "$bin/fp8flow" bench --suite layer --samples 5 --idle 0 --sustain 0 --backend hopper --out "$out/bench" --overwrite
fi

# watch TOOL [BARRIERS]: sets `run` to compute-sanitizer's TOOL, for a program after it; exit status 77 where it is missing. memcheck runs a
# whole test, which costs little; the others the small shapes (tests/support/cases.h). Watched are this project's kernels, not those of libraries; racecheck
# and initcheck do not follow what those write, so that they run the cases without.
watch() {
    run=(compute-sanitizer --tool "$1" --error-exitcode 1 --print-limit 20 --kernel-name kns=fp8flow)
    case $1 in
        memcheck) run+=(--leak-check no --report-api-errors no) ;; # NCCL asks for kernels that it has not; our calls are checked
        # by itself the tool counts the barriers of C++'s cuda::barrier only; where it has room for fewer than a grid has in use, it says so and the
        # kernel ends in a launch failure
        synccheck) run=(env FP8FLOW_SMALL_SHAPES=1 "${run[@]}" --num-cuda-barriers "${2:-4096}") ;;
        racecheck) run=(env FP8FLOW_SMALL_SHAPES=1 FP8FLOW_OWN_KERNELS=1 "${run[@]}" --num-cuda-barriers 256) ;;
        initcheck) run=(env FP8FLOW_SMALL_SHAPES=1 FP8FLOW_OWN_KERNELS=1 "${run[@]}") ;;
    esac
    if ! command -v compute-sanitizer > /dev/null; then run=(sh -c 'echo compute-sanitizer is not here; exit 77'); fi
}
# sanitize TOOL TEST: sets `run` to TEST under TOOL.
sanitize() {
    # every node of a graph takes memory for its barriers: that of an H200 is not enough for 4096 in each of the exchange's
    if [[ $2 == *peer_exchange_test ]]; then watch "$1" 1024; else watch "$1"; fi
    run+=("$bin/tests/$2" --gtest_brief=1)
    # racecheck (2025.3) does not follow a release in which one lane arrives for its warp: it reports the reads of the row scales in the
    # overlapped FP8 product against the copies that refill them, as it does in a kernel of twenty lines of that kind, and is silent
    # there if all lanes arrive. This is the test in which stages are refilled; memcheck, initcheck and synccheck run it, too.
    if [[ $1 == racecheck && $2 == *gemm_parity_test ]]; then run+=('--gtest_filter=-GroupedGemmParity.ManyStepsAndTiles'); fi
    # Nor the rings of tiles in which columns of groups are quantised (quantize_column_tiles.cu, quantize_group_columns.cu): an order between two roles
    # of warps that comes by way of a third, as that maxima are read before the loader brings the tiles whose maxima take their place.
    if [[ $1 == racecheck && $2 == *quantize_parity_test ]]; then run+=('--gtest_filter=-QuantizeParity.*Columns*:QuantizeParity.Dual'); fi
    # Nor does it follow stores that complete another CTA's barrier (st.async): in the cross-entropy of rows that warps and CTAs share it reports
    # the factors of a row, which warps have read before they send their part of a later row, against the warp that waits for those parts
    # and then writes.
    if [[ $1 == racecheck && $2 == *token_parity_test ]]; then run+=('--gtest_filter=-TokenParity.CrossEntropy*'); fi
    # initcheck keeps a shadow of what was freed, so that less memory is free afterwards
    if [[ $1 == initcheck && $2 == *peer_exchange_test ]]; then run+=('--gtest_filter=-PeerMemory.IsCreatedAndFreedManyTimes'); fi
    # of the whole step only the runs on this project's own kernels
    if [[ $2 == *_step_parity_test ]]; then run+=('--gtest_filter=*_native'); fi
}
for tool in "${tools[@]}"; do
    for test in "${gpu_tests[@]}"; do
        [[ $test == *_parity_test || $test == *_exchange_test ]] || continue
        # tests of libraries, and with them
        [[ ! $tool =~ racecheck|initcheck || ! $test =~ _step_parity_test ]] || continue
        sanitize "$tool" "$test"
        place "$test"
        add "${place[@]}" --patience 240 --detail '(ERROR|RACECHECK) SUMMARY|is not here' "$tool $test" "${run[@]}"
    done
done
if ((gpus >= 2)); then
    for test in "${mpi_tests[@]}"; do
        [[ $test != *golden* ]] || continue # whole trainings, of operations that the other tests watch
        sanitize memcheck "$test"
        watched=("${run[@]}")
        on_ranks 2
        add --gpus 2 --patience 240 --detail 'ERROR SUMMARY|is not here' "memcheck $test" "${run[@]}" "${watched[@]}"
    done
fi
# Whole steps whose lanes run beside each other. (racecheck looks at the shared memory of one kernel, whatever runs beside it.)
side_lane=(--set schedule.moe_shared_expert_overlap=true --set schedule.delay_wgrad_compute=true)
turns=(--set schedule.overlap_moe_expert_parallel_comm=true)
ranks=$((gpus >= 2 ? 2 : 1))
for schedule in side_lane turns; do
    declare -n keys=$schedule
    watch memcheck
    watched=("${run[@]}")
    on_ranks "$ranks"
    add --gpus "$ranks" --patience 240 --detail 'ERROR SUMMARY|is not here' "memcheck train, $schedule, on $ranks" "${run[@]}" "${watched[@]}" \
        "$bin/fp8flow" train "$root/configs/test.yaml" --backend hopper --out "$out/memcheck-$schedule" --overwrite "${keys[@]}" \
        --set schedule.overlap_grad_reduce=true --set "parallel.expert_model_parallel_size=$ranks" --set training.train_iters=3 \
        --set training.eval_iters=0 --set parallel.peer_deadline_seconds=200
done

run_and_report "$out/gpu_check.json"
