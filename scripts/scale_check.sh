#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# What one machine of 2, 4 or 8 Hopper GPUs says about scale, in one call, the most telling first: the DeepSeek-V3 layer under every schedule,
# with micro-batches, in one graph with BF16 state; bits, faults and checkpoints over all ranks; the wire; layers of other models; expert x data
# parallel with divided state; hosts of half the GPUs each; Qwen3-30B-A3B whole; and plan against all of it. Prints a table of bars and writes
# scale_check.json; results of profile and bench lie in folders beside it. Exit status 1 if a check failed; a bar that is missed is no failure.
# Usage: scale_check.sh [--budget SECONDS] [--resume FILE] [--only REGEX] [--skip REGEX] [--share RANKS | --rehearsal RANKS] [FOLDER]
#   --budget     no check starts later than this after the start, build included; what no longer fits is "not run"
#   --resume     results are kept in FILE as they come; checks that passed there on the same sources and kind of GPU are not run again, so that
#                calls with the same FILE and FOLDER together do all
#   --only       only checks whose name matches, e.g. --only '^layer'
#   --skip       without checks whose name matches
#   --share      instead of all that: bits and the exchange over peer memory with so many ranks, more than there are GPUs, which share them
#   --rehearsal  every command at a toy size with so many ranks on the reference backend, without a GPU: that all of them are accepted and read
#   FOLDER       for logs, results and scale_check.json; default runs/scale_check
set -uo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/check_queue.sh
source "$root/scripts/check_queue.sh"

command="./scripts/scale_check.sh${*:+ $*}"
share='' rehearsal='' out=$root/runs/scale_check
read_arguments budget resume only skip share rehearsal -- "$@"
[[ $rehearsal =~ ^(|2|4|8)$ ]] || die 2 "--rehearsal: got '$rehearsal', want 2, 4 or 8 ranks"
[[ $share =~ ^(|4|8|16)$ ]] || die 2 "--share: got '$share', want 4, 8 or 16 ranks"
[[ -z $share || -z $rehearsal ]] || die 2 "--share: a rehearsal has no GPUs to share"
prepare_checks
export FP8FLOW_GOLDEN=require

if [[ -n $rehearsal ]]; then
    mapfile -t gpu_ids < <(seq 0 $((rehearsal - 1)))
    gpu_name="none (rehearsal)" backend=reference preset=cpu
    configure cpu && build cpu fp8flow fp8flow_faults || exit
else
    find_gpus
    ((${#gpu_ids[@]} > 0)) || die 2 "no GPU is visible here"
    backend=hopper preset=cuda-release
    [[ -n $share || ${#gpu_ids[@]} =~ ^[248]$ ]] || die 2 "${#gpu_ids[@]} GPUs are visible here; scale_check.sh is for 2, 4 or 8"
    [[ -z $share || $share -gt ${#gpu_ids[@]} ]] || die 2 "--share: $share ranks have a GPU each here; leave it out"
    require_cuda_toolkit
    tests=(gpu_mpi_exchange_gpu_test gpu_mpi_checkpoint_gpu_test gpu_mpi_golden_test)
    configure cuda-release && build cuda-release fp8flow fp8flow_faults "${tests[@]}" || exit
fi
gpus=${#gpu_ids[@]}
bin=$root/build/$preset

# ---- the checks, the most telling first -----------------------------------------------------------------------------------------------
folder_of() { echo "$out/${1// /_}"; }

# Toy sizes of a rehearsal; `whole` for models with attention.
layer=() whole=()
if [[ -n $rehearsal ]]; then
    layer=(--set model.hidden_size=128 --set model.seq_length=32 --set moe.moe_ffn_hidden_size=128)
    whole=(--set data.synthetic_order=1 --set model.num_layers=2 --set model.num_attention_heads=4 --set model.num_query_groups=4 --set model.kv_channels=32
        --set model.ffn_hidden_size=128 --set model.vocab_size=512 --set data.synthetic_vocab_size=512)
fi
synthetic=(--set data.data_kind=synthetic --set 'data.data_path=[]')

# profile [--steps N] NAME RANKS CONFIG ARGUMENT...: a result of profile in the folder of that name, with its times, clocks and energy as figures.
profile() {
    local steps=() name ranks config folder
    if [[ $1 == --steps ]]; then steps=("$1" "$2") && shift 2; fi
    if [[ -n $rehearsal ]]; then steps=(--steps 2); fi
    name=$1 ranks=$2 config=$3 folder=$(folder_of "$1")
    shift 3
    on_ranks "$ranks"
    add --gpus "$ranks" --limit 150 --detail '^ *(fp8_flow|serial)|rror' --figures "python3 '$root/scripts/scale_figures.py' '$folder/profile.json'" \
        "$name" "${run[@]}" "$bin/fp8flow" profile "$root/configs/$config.yaml" --backend "$backend" --out "$folder" --overwrite "${layer[@]}" \
        "${steps[@]}" "$@"
}
# deepseek EP: the layer's keys for so many ranks that share its experts. Two ranks hold 128, of which each has as many as of 256 on four.
deepseek() {
    local experts=$(($1 >= 4 ? 256 : 128))
    if [[ -n $rehearsal ]]; then experts=32; fi
    keys=(--set "parallel.expert_model_parallel_size=$1" --set "moe.num_experts=$experts" --recipes fp8_flow)
    batch=(--set "training.global_batch_size=$1")
}
overlapped=(--set schedule.moe_shared_expert_overlap=true --set schedule.delay_wgrad_compute=true --set schedule.overlap_grad_reduce=true)
graph=(--set schedule.cuda_graph_impl=full_iteration)
no_energy=(--set profile.energy_seconds=0)

# golden NAME TEST [LIMIT] [LAUNCHER...]. Alone on the GPUs: kernels that wait for other ranks crawl where processes take turns on a GPU.
golden() {
    local limit=${3:-$((gpus == 8 ? 300 : 120))}
    add --gpus "$gpus" --limit "$limit" --detail '\[  (PASSED|FAILED)  \]|skipped' "bits: $1" "${@:4}" "${run[@]}" "$bin/tests/gpu_mpi_golden_test" \
        "--gtest_filter=Golden.$2"
}
# test_of NAME PROGRAM LIMIT FILTER [LAUNCHER...]
test_of() { add --gpus "$gpus" --limit "$3" --detail '\[  (PASSED|FAILED)  \]' "test: $1" "${@:5}" "${run[@]}" "$bin/tests/$2" "--gtest_filter=$4"; }

# NCCL does not work between ranks that share a GPU; peer memory and staging through the host do.
if [[ -n $share ]]; then
    on_ranks "$share"
    shared() { golden "$1, $share ranks" "$2" 300 env FP8FLOW_SHARE_GPUS=1; }
    shared schedules SchedulesChangeNoBit
    shared graphs GraphsChangeNoBit
    shared 'saved rows' SavedRowsChangeNoBit
    shared 'order invariant' InvariantOrderChangesNoBit
    shared 'divided state' DividedStateChangesNoBit
    shared recompute RecomputeChangesNoBit
    test_of "checkpoint, $share ranks" gpu_mpi_checkpoint_gpu_test 300 '*' env FP8FLOW_SHARE_GPUS=1
    test_of "exchange by two levels, $share ranks" gpu_mpi_exchange_gpu_test 560 '*/levels'
    test_of "exchange, $share ranks" gpu_mpi_exchange_gpu_test 560 '*/peer'
    run_and_report "$out/scale_check.json"
    exit
fi

deepseek "$gpus"
profile "layer deepseek_v3" "$gpus" layer_deepseek_v3 "${keys[@]}" "${batch[@]}" --schedules
profile --steps 8 "layer deepseek_v3 micro-batches" "$gpus" layer_deepseek_v3 "${keys[@]}" "${no_energy[@]}" --set "training.global_batch_size=$((8 * gpus))" \
    --schedules
profile "layer deepseek_v3 graph" "$gpus" layer_deepseek_v3 "${keys[@]}" "${batch[@]}" "${overlapped[@]}" "${graph[@]}" --state-dtypes
if ((gpus == 8)); then
    deepseek 4
    profile "layer deepseek_v3 on 4" 4 layer_deepseek_v3 "${keys[@]}" "${batch[@]}"
    deepseek "$gpus"
fi

on_ranks "$gpus"
exchange=(--suite exchange)
if [[ -n $rehearsal ]]; then exchange=(dispatch combine --shape "T=16,E=8,K=2,H=128" --samples 2 --idle 0 --sustain 0); fi
add --gpus "$gpus" --limit 180 --detail 'written|rror' --figures "python3 '$root/scripts/scale_figures.py' '$out/exchange/bench.json'" exchange \
    "${run[@]}" "$bin/fp8flow" bench "${exchange[@]}" --backend "$backend" --out "$out/exchange" --overwrite

# train_whole FOLDER LAUNCHER... -- ARGUMENT...: trains, then plan says what memory it states for the same configuration.
# shellcheck disable=SC2317  # called by the check of that name
train_whole() {
    local folder=$1 launcher=()
    shift
    while [[ $1 != -- ]]; do launcher+=("$1") && shift; done
    shift
    "${launcher[@]}" "$bin/fp8flow" train "$@" --out "$folder" --overwrite &&
        "$bin/fp8flow" plan "$folder/config.yaml" --gpus "$gpus" --json plan.json --out "${folder}_plan" > /dev/null
}
export -f train_whole
export bin gpus
whole_model=(--set moe.moe_router_force_load_balancing=true --set "parallel.expert_model_parallel_size=$gpus" --set "training.global_batch_size=$((4 * gpus))" --set training.main_grads_dtype=bf16
    --set training.exp_avg_dtype=bf16 --set training.exp_avg_sq_dtype=bf16 --set training.train_iters=8 --set training.lr_warmup_iters=2
    --set training.eval_iters=0 --set output.log_interval=1)
add --gpus "$gpus" --limit 300 --detail 'tokens/s|rror' --figures "python3 '$root/scripts/scale_figures.py' '$out/qwen3_30b_a3b'" "train qwen3_30b_a3b" \
    bash -c 'train_whole "$@"' _ "$out/qwen3_30b_a3b" "${run[@]}" -- "$root/configs/qwen3_30b_a3b.yaml" --backend "$backend" "${layer[@]}" \
    "${whole[@]}" "${whole_model[@]}"

if [[ -z $rehearsal ]]; then
    if ((gpus < 8)); then golden hashes Hopper; fi  # the committed file has jobs of 1, 2 and 4 ranks
    golden 'alltoall is flex' AlltoallIsFlex
    golden 'divided state' DividedStateChangesNoBit
    golden 'divided state over messages' DividedStateOverMessagesChangesNoBit $((gpus == 8 ? 300 : 240))
    golden schedules SchedulesChangeNoBit
    golden hosts HostsChangeNoBit
    golden 'two levels' TwoLevelsChangeNoBit
    golden graphs GraphsChangeNoBit
    golden 'saved rows' SavedRowsChangeNoBit
    golden 'order invariant' InvariantOrderChangesNoBit
    add --gpus "$gpus" --limit 200 --detail 'written|failed' 'train twice, validate' "$root/scripts/gpu_check.sh" \
        --only "^(train|train twice|validate) on $gpus\$" "$out/gpu_check"
    while IFS='|' read -r part filter environment; do
        test_of "exchange$part" gpu_mpi_exchange_gpu_test 300 "$filter" env ${environment:+"$environment"}
    done < <(parts_of_exchange)
    test_of checkpoint gpu_mpi_checkpoint_gpu_test $((gpus == 8 ? 560 : 400)) '*'
fi

profile --steps 20 "layer deepseek_v3 8192 tokens" "$gpus" layer_deepseek_v3 "${keys[@]}" --set training.micro_batch_size=2 \
    --set "training.global_batch_size=$((2 * gpus))" "${no_energy[@]}" --schedules

# Expert x data parallel, state whole, divided, and divided with the wire beside the layers.
half=(--set "parallel.expert_model_parallel_size=$((gpus / 2))" --set training.micro_batch_size=4 --set "training.global_batch_size=$((4 * gpus))"
    --recipes fp8_flow "${no_energy[@]}" "${synthetic[@]}" "${whole[@]}")
divided=(--set training.use_distributed_optimizer=true)
profile "state whole" "$gpus" h200_100m "${half[@]}"
profile "state divided" "$gpus" h200_100m "${half[@]}" "${divided[@]}"
profile "state divided overlapped" "$gpus" h200_100m "${half[@]}" "${divided[@]}" --set schedule.overlap_grad_reduce=true \
    --set schedule.overlap_param_gather=true
if [[ -n $rehearsal ]]; then
    faults=(--fp8flow "$bin/fp8flow" --ranks "$gpus" --victims alternate --kinds killed --stages step --budget 60)
else
    # eight processes take two to three times as long to start as four
    faults=(--backend hopper --ranks "$gpus" --victims alternate --kinds 'killed,stopped,throwing' --start 40 --budget $((gpus == 8 ? 320 : 140))
        --deadline $((gpus == 8 ? 10 : 5)) --stages 'MPI_Init,set_up,first step,step,checkpoint,exporting,summary')
fi
add --gpus "$gpus" --limit $((gpus == 8 ? 400 : 200)) --detail ' hold ' faults "$root/scripts/fault_matrix.py" "${faults[@]}" --json "$out/faults.json"

# Hosts of half the ranks each: experts inside a host, and experts over both, flat and by two levels.
hosts=(--set "parallel.hosts=2x$((gpus / 2))")
deepseek $((gpus / 2))
profile "hosts, experts inside" "$gpus" layer_deepseek_v3 "${keys[@]}" --set "training.global_batch_size=$gpus" "${hosts[@]}" "${no_energy[@]}"
deepseek "$gpus"
profile "hosts, experts across" "$gpus" layer_deepseek_v3 "${keys[@]}" "${batch[@]}" "${hosts[@]}" "${no_energy[@]}"
profile "hosts, experts across, fixed sizes" "$gpus" layer_deepseek_v3 "${keys[@]}" "${batch[@]}" "${hosts[@]}" "${no_energy[@]}" \
    --set parallel.moe_message_sizes=fixed
profile --steps 5 "hosts, two levels" "$gpus" layer_deepseek_v3 "${keys[@]}" "${batch[@]}" "${hosts[@]}" "${no_energy[@]}" \
    --set parallel.moe_token_dispatcher_type=hierarchical

recipes=(--recipes 'bf16,fp8_blockwise,fp8_flow' "${no_energy[@]}" --set "parallel.expert_model_parallel_size=$gpus" --set "training.global_batch_size=$gpus")
for model in qwen3_235b_a22b qwen3_30b_a3b mixtral_8x7b deepseek_v2_lite; do
    profile "layer $model" "$gpus" "layer_$model" "${recipes[@]}"
done
profile "model h200_100m" "$gpus" h200_100m --recipes fp8_flow "${no_energy[@]}" --set "parallel.expert_model_parallel_size=$gpus" \
    --set training.micro_batch_size=4 --set "training.global_batch_size=$((4 * gpus))" "${synthetic[@]}" "${whole[@]}" --schedules

status=0
run_and_report "$out/scale_check.json" || status=1

# Predictions of what was measured here.
if [[ -z $rehearsal ]] && compgen -G "$out/*/profile.json" > /dev/null; then
    mkdir -p "$out/plan"
    for file in "$out"/*/profile.json; do cp "$file" "$out/plan/$(basename "$(dirname "$file")").json"; done
    "$bin/fp8flow" plan --check "$out/plan" > "$out/plan.txt" 2>&1 || status=1
    tail -n 3 "$out/plan.txt"
fi
python3 "$root/scripts/scale_figures.py" --bars "$out/scale_check.json"
exit $status
