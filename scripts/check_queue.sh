# SPDX-License-Identifier: MIT
# A queue of checks over the GPUs of a machine, for gpu_check.sh; sourced after common.sh, never run.
# Small checks share a GPU; others have one or several GPUs to themselves. They start in the order in which they were added, as soon as
# what they need is free.
# shellcheck shell=bash

# The caller sets these:
out=.        # folder for logs
gpu_ids=()   # as CUDA_VISIBLE_DEVICES names them
cores=1      # to divide among the checks that run at a time
root=${root:-.}  # of the project, left out of what is shown
budget=0     # seconds of this shell's life after which nothing starts; 0: no end

checks_per_gpu=3  # of the small ones
check_names=() check_commands=() check_gpus=() check_slots=() check_limits=() check_details=() check_late=()
check_rows=()  # after run_checks: one JSON object a check, in the order of addition

# add_check [--gpus N] [--limit SECONDS] [--patience SECONDS] [--detail REGEX] NAME COMMAND...
#   --gpus      this many GPUs, alone on them; without it: a share of one GPU
#   --limit     the check is stopped and failed after so long (300)
#   --patience  the check is stopped after so long and counts as not run: slow tools that had found nothing
#   --detail    its row shows the last line of output that matches (any line)
add_check() {
    local count=1 slots=1 limit=300 late=failed detail=.
    while [[ $1 == --* ]]; do
        case $1 in
            --gpus) count=$2 slots=$checks_per_gpu ;;
            --limit) limit=$2 ;;
            --patience) limit=$2 late='not run' ;;
            --detail) detail=$2 ;;
            *) die 70 "add_check: $1" ;;
        esac
        shift 2
    done
    check_names+=("$1") check_gpus+=("$count") check_slots+=("$slots") check_limits+=("$limit")
    check_late+=("$late") check_details+=("$detail")
    shift
    check_commands+=("$(printf '%q ' "$@")")
}

# result_line NAME RESULT SECONDS DETAIL
result_line() { printf '%-42s %-8s %5s s  %s\n' "$1" "$2" "$3" "$4"; }

# first_match, last_match REGEX FILE: the line that matches, without what JSON would need escaped.
first_match() { grep -aE -m 1 "$1" "$2" | plain_text; }
last_match() { grep -aE "$1" "$2" | tail -n 1 | plain_text; }
plain_text() { sed "s|$root/||g" | tr -d '"\134' | tr -c '[:print:]\n' ' ' | sed 's/^ *//' | cut -c 1-110; }

# run_check INDEX DEVICES THREADS: one check, in a process of its own; leaves RESULT, SECONDS and DETAIL, a line each, in results/INDEX,
# then says INDEX through `finished`.
run_check() {
    local name=${check_names[$1]} limit=${check_limits[$1]} result=passed detail='' status=0 started=$SECONDS log
    log=$out/${name//[ \/]/_}.log
    if ((budget > 0 && SECONDS + limit > budget)); then limit=$((budget > SECONDS ? budget - SECONDS : 0)); fi
    if ((limit == 0)); then
        result="not run" detail="the budget of $budget s is used up"
    else
        CUDA_VISIBLE_DEVICES=$2 OMP_NUM_THREADS=$3 timeout -k 10 "$limit" bash -c "${check_commands[$1]}" > "$log" 2>&1 < /dev/null &
        # shellcheck disable=SC2064  # this very process
        trap "kill $!" TERM
        wait $! || status=$?
        detail=$(last_match "${check_details[$1]}" "$log")
        case $status in
            0) ;;
            77) result="not run" ;;  # the tests' own word for "cannot run here"
            124 | 137)
                result=${check_late[$1]} detail="stopped after $limit s"
                if ((limit < check_limits[$1])); then result="not run" detail+=": the budget of $budget s is used up"; fi
                ;;
            *)
                result=failed
                detail=$(first_match 'Failure|[Ee]rror:|Invalid|Uninitialized|Barrier|hazard' "$log")
                detail="exit status $status: ${detail:-$(last_match . "$log")}"
                ;;
        esac
        # a tool that this machine's driver or kernel refuses says nothing about the program
        if [[ $result == failed ]] && grep -qE 'Device not supported|not supported on this' "$log"; then
            result="not run" detail=$(last_match 'not supported' "$log")
        fi
    fi
    printf '%s\n%s\n%s\n' "$result" $((SECONDS - started)) "$detail" > "$out/results/$1"
    result_line "$name" "$result" $((SECONDS - started)) "$detail"
    echo "$1" >&"$finished"
}

# take_gpus INDEX: sets `taken` (places in gpu_ids) and returns true if what the check needs is free.
take_gpus() {
    local gpu level
    taken=()
    # the emptiest GPU first, so that small checks spread before they share
    for ((level = checks_per_gpu; level >= check_slots[$1]; --level)); do
        for ((gpu = 0; gpu < ${#gpu_ids[@]} && ${#taken[@]} < check_gpus[$1]; ++gpu)); do
            if ((free_slots[gpu] == level)); then taken+=("$gpu"); fi
        done
    done
    ((${#taken[@]} == check_gpus[$1])) || return 1
    for gpu in "${taken[@]}"; do free_slots[gpu]=$((free_slots[gpu] - check_slots[$1])); done
}

# Runs all checks; fills check_rows; returns 1 if one failed.
run_checks() {
    local total=${#check_names[@]} next=0 running=0 index gpu finished taken=() devices threads status=0 result seconds detail
    local free_slots=() gpus_of=() pids=()
    for ((gpu = 0; gpu < ${#gpu_ids[@]}; ++gpu)); do free_slots[gpu]=$checks_per_gpu; done
    mkdir -p "$out/results"
    rm -f "$out"/results/*
    mkfifo "$out/results/finished"  # not `wait -n`, which overlooks a child that ended while another command ran
    exec {finished}<> "$out/results/finished"
    trap 'kill "${pids[@]}"; exit 130' INT TERM
    while ((next < total || running > 0)); do
        if ((next < total)) && take_gpus $next; then
            devices=$(for gpu in "${taken[@]}"; do echo "${gpu_ids[gpu]}"; done | paste -sd ,)
            threads=$((cores * check_slots[next] / (${#gpu_ids[@]} * checks_per_gpu)))  # of one process, one a GPU
            run_check $next "$devices" $((threads > 0 ? threads : 1)) &
            pids[next]=$! gpus_of[next]=${taken[*]}
            ((++next, ++running))
            continue
        fi
        read -r index <&"$finished"
        for gpu in ${gpus_of[index]}; do free_slots[gpu]=$((free_slots[gpu] + check_slots[index])); done
        unset "pids[index]"
        ((--running))
    done
    trap - INT TERM
    exec {finished}>&-
    say "results"
    for ((index = 0; index < total; ++index)); do
        result=failed seconds=0 detail="no result was written"
        if [[ -f $out/results/$index ]]; then
            { read -r result; read -r seconds; read -r detail; } < "$out/results/$index"
        fi
        [[ $result != failed ]] || status=1
        result_line "${check_names[index]}" "$result" "$seconds" "$detail"
        check_rows+=("{\"check\": \"${check_names[index]}\", \"result\": \"$result\", \"seconds\": $seconds, \"detail\": \"$detail\"}")
    done
    rm -r "$out/results"
    return $status
}
