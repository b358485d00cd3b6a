# SPDX-License-Identifier: MIT
# A queue of checks over the GPUs of a machine, for gpu_check.sh and scale_check.sh; sourced after common.sh, never run.
# Small checks share a GPU; others have one or several GPUs to themselves. They start in the order in which they were added, as soon as
# what they need is free.
# shellcheck shell=bash

# The caller sets these:
out=.        # folder for logs
gpu_ids=()   # as CUDA_VISIBLE_DEVICES names them
cores=1      # to divide among the checks that run at a time
root=${root:-.}  # of the project, left out of what is shown
budget=0     # seconds of this shell's life after which nothing starts; 0: no end
resume=''    # file in which results are kept between calls; '': none
source_key=''  # what results in it belong to: those of another key count for nothing

gpu_name=none  # of the machine's first GPU
command=''  # as the script was called, for its report
only='' skip=''  # regular expressions of names, for `add`

checks_per_gpu=3  # of the small ones
check_names=() check_commands=() check_gpus=() check_slots=() check_limits=() check_details=() check_late=() check_figures=()
check_rows=()  # after run_checks: one JSON object a check, in the order of addition

# read_arguments NAME... -- ARGUMENT...: `--NAME VALUE` into the variable of that name, an argument without dashes into out; --help prints the
# head of the script.
read_arguments() {
    local options=' '
    while [[ $1 != -- ]]; do options+="$1 " && shift; done
    shift
    while (($# > 0)); do
        case $1 in
            -h | --help) help_if_asked "$1" ;;
            -*)
                [[ $1 == --* && $options == *" ${1#--} "* ]] || no_arguments "$@"
                (($# >= 2)) || die 2 "$1: a value is missing"
                printf -v "${1#--}" %s "$2"
                shift
                ;;
            *) out=$1 ;;
        esac
        shift
    done
    [[ $budget =~ ^[0-9]+$ ]] || die 2 "--budget: got '$budget', want seconds"
}

# The folder, the cores, and the environment of MPI, OpenMP and NCCL for all checks.
prepare_checks() {
    mkdir -p "$out" || die 2 "cannot create $out"
    out=$(cd "$out" && pwd)
    cores=$(usable_cores)
    export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_btl_base_warn_component_unused=0 OMPI_MCA_mpi_yield_when_idle=1
    export OMP_WAIT_POLICY=passive NCCL_NVLS_ENABLE=0
    if (($(id -u) == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
}
find_gpus() {
    mapfile -t gpu_ids < <(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null)
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then IFS=, read -ra gpu_ids <<< "$CUDA_VISIBLE_DEVICES"; fi
    gpu_name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1)
}
require_cuda_toolkit() {
    local problem
    problem=$(cuda_toolkit_problem)
    [[ -z $problem ]] || die 2 "the CUDA backend cannot be built: $problem"
}

wanted() { [[ $1 =~ $only ]] && [[ -z $skip || ! $1 =~ $skip ]]; }
# add [options of add_check] NAME COMMAND...: unless --only or --skip say otherwise
add() {
    local option=1
    while [[ ${!option} == --* ]]; do ((option += 2)); done
    if wanted "${!option}"; then add_check "$@"; fi
}
# on_ranks N: sets `run`, the launcher of so many ranks.
on_ranks() { run=(mpirun -n "$1" --quiet --bind-to none --oversubscribe); }

# parts_of_exchange: the kinds of exchange, each a check of its own, as lines "SUFFIX|FILTER|ENVIRONMENT". With handles of CUDA IPC NCCL starts
# sooner (tests/gpu_mpi/golden_test.cu says why); its windows need those of cuMem.
parts_of_exchange() {
    local kind
    for kind in peer levels levels_fixed nccl nccl_fixed staged; do echo ", $kind|*/$kind|NCCL_CUMEM_ENABLE=0"; done
    echo ', window|*/window|'
}

# add_check [--gpus N] [--limit SECONDS] [--patience SECONDS] [--detail REGEX] [--figures COMMAND] NAME COMMAND...
#   --gpus      this many GPUs, alone on them; without it: a share of one GPU
#   --limit     the check is stopped and failed after so long (300)
#   --patience  the check is stopped after so long and counts as not run: slow tools that had found nothing
#   --detail    its row shows the last line of output that matches (any line)
#   --figures   a command that, after the check, prints a JSON object for its row
add_check() {
    local count=1 slots=1 limit=300 late=failed detail=. figures=''
    while [[ $1 == --* ]]; do
        case $1 in
            --gpus) count=$2 slots=$checks_per_gpu ;;
            --limit) limit=$2 ;;
            --patience) limit=$2 late='not run' ;;
            --detail) detail=$2 ;;
            --figures) figures=$2 ;;
            *) die 70 "add_check: $1" ;;
        esac
        shift 2
    done
    check_names+=("$1") check_gpus+=("$count") check_slots+=("$slots") check_limits+=("$limit")
    check_late+=("$late") check_details+=("$detail") check_figures+=("$figures")
    shift
    check_commands+=("$(printf '%q ' "$@")")
}

# result_line NAME RESULT SECONDS DETAIL
result_line() { printf '%-42s %-8s %5s s  %s\n' "$1" "$2" "$3" "$4"; }

# first_match, last_match REGEX FILE: the line that matches, without colours and what JSON would need escaped.
first_match() { grep -aE -m 1 "$1" "$2" | plain_text; }
last_match() { grep -aE "$1" "$2" | tail -n 1 | plain_text; }
plain_text() { sed "s|$root/||g; s/\x1b\[[0-9;]*m//g" | tr -d '"\134' | tr -c '[:print:]\n' ' ' | sed 's/^ *//' | cut -c 1-110; }

# key_of_sources: one word for the contents of everything that is built or run.
key_of_sources() {
    (cd "$root" && find CMakeLists.txt CMakePresets.json cmake configs include kernels layers model scripts tests -type f -print0 2> /dev/null |
        sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16)
}

# errors_of_validate FILE: {"recipe": largest relative loss error, ...} of a validate.json; nothing where there is none.
errors_of_validate() {
    [[ -f $1 ]] || return 0
    awk -F '"' '
        $2 == "arm" { arm = $4 }
        $2 == "max relative error" { value = $3; gsub(/[:, ]/, "", value); list = list separator "\"" arm "\": " value; separator = ", " }
        END { print "{" list "}" }' "$1"
}

# Results are kept in `resume` as lines KEY|NAME|RESULT|SECONDS|FIGURES|DETAIL, written as they come; the last of a name counts.
# read_kept: fills kept (by name, "RESULT|SECONDS|FIGURES|DETAIL").
read_kept() {
    local key name rest
    kept=()
    [[ -n $resume && -f $resume ]] || return 0
    while IFS='|' read -r key name rest; do
        if [[ $key == "$source_key" && -n $name && $rest == *'|'*'|'*'|'* ]]; then kept[$name]=$rest; fi
    done < "$resume"
}

# run_check INDEX DEVICES THREADS: one check, in a process of its own; leaves RESULT, SECONDS, FIGURES and DETAIL, a line each, in
# results/INDEX, then says INDEX through `finished`.
run_check() {
    local name=${check_names[$1]} limit=${check_limits[$1]} result=passed detail='' figures='' status=0 started=$SECONDS log
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
                detail=$(first_match 'exception with description|Signal: ' "$log")
                detail=${detail:-$(first_match 'Failure|[Ee]rror:|Invalid|Uninitialized|Barrier|hazard' "$log")}
                detail="exit status $status: ${detail:-$(last_match . "$log")}"
                ;;
        esac
        # a tool that this machine's driver or kernel refuses says nothing about the program
        if [[ $result == failed ]] && grep -qE 'Device not supported|not supported on this' "$log"; then
            result="not run" detail=$(last_match 'not supported' "$log")
        fi
    fi
    if [[ -n ${check_figures[$1]} ]]; then figures=$(eval "${check_figures[$1]}" | head -n 1); fi
    printf '%s\n%s\n%s\n%s\n' "$result" $((SECONDS - started)) "$figures" "$detail" > "$out/results/$1"
    # what the budget left no time for has not been tried
    if [[ -n $resume && ! ($result == "not run" && $detail == "the budget of "*) ]]; then
        printf '%s|%s|%s|%s|%s|%s\n' "$source_key" "$name" "$result" $((SECONDS - started)) "$figures" "$detail" >> "$resume"
    fi
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

# Sets `order`: the checks that did not pass before, those that were never tried first, then those that failed, then the rest.
order_checks() {
    local index result fresh=() failed=() other=()
    for ((index = 0; index < ${#check_names[@]}; ++index)); do
        result=${kept[${check_names[index]}]:-none}
        case ${result%%|*} in
            none) fresh+=("$index") ;;
            passed) ;;
            failed) failed+=("$index") ;;
            *) other+=("$index") ;;
        esac
    done
    order=("${fresh[@]}" "${failed[@]}" "${other[@]}")
}

# Runs all checks, but those that passed before; fills check_rows, in the order of addition; returns 1 if one failed.
run_checks() {
    local total next=0 running=0 index gpu finished taken=() devices threads status=0 left=0 result seconds figures detail
    local free_slots=() gpus_of=() pids=() order=()
    local -A kept=()
    read_kept
    order_checks
    total=${#order[@]}
    if [[ -n $resume ]]; then
        mkdir -p "$(dirname "$resume")"
        say "$resume: $((${#check_names[@]} - total)) of ${#check_names[@]} checks passed before on the same sources"
    fi
    for ((gpu = 0; gpu < ${#gpu_ids[@]}; ++gpu)); do free_slots[gpu]=$checks_per_gpu; done
    mkdir -p "$out/results"
    rm -f "$out"/results/*
    mkfifo "$out/results/finished"  # not `wait -n`, which overlooks a child that ended while another command ran
    exec {finished}<> "$out/results/finished"
    trap 'kill "${pids[@]}"; exit 130' INT TERM
    while ((next < total || running > 0)); do
        if ((next < total)) && take_gpus "${order[next]}"; then
            index=${order[next]}
            devices=$(for gpu in "${taken[@]}"; do echo "${gpu_ids[gpu]}"; done | paste -sd ,)
            threads=$((cores * check_slots[index] / (${#gpu_ids[@]} * checks_per_gpu)))  # of one process, one a GPU
            run_check "$index" "$devices" $((threads > 0 ? threads : 1)) &
            pids[index]=$! gpus_of[index]=${taken[*]}
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
    for ((index = 0; index < ${#check_names[@]}; ++index)); do
        result=failed seconds=0 figures='' detail="no result was written"
        if [[ -f $out/results/$index ]]; then
            { read -r result; read -r seconds; read -r figures; read -r detail; } < "$out/results/$index"
        elif [[ ${kept[${check_names[index]}]:-} == passed* ]]; then
            IFS='|' read -r result seconds figures detail <<< "${kept[${check_names[index]}]}"
        fi
        [[ $result != failed ]] || status=1
        [[ $result == passed ]] || ((++left))
        result_line "${check_names[index]}" "$result" "$seconds" "$detail"
        check_rows+=("{\"check\": \"${check_names[index]}\", \"result\": \"$result\", \"seconds\": $seconds, ${figures:+\"figures\": $figures, }\"detail\": \"$detail\"}")
    done
    if [[ -n $resume ]]; then say "$left of ${#check_names[@]} checks are left; the same call goes on with them"; fi
    rm -r "$out/results"
    return $status
}

# run_and_report FILE: runs the checks and writes all rows to FILE, in JSON; returns 1 if a check failed. COMMIT: where this is no checkout.
run_and_report() {
    local status=0
    if [[ -n $resume ]]; then source_key=$(key_of_sources)/$(tr -c 'A-Za-z0-9\n' _ <<< "$gpu_name"); fi
    say "${#check_names[@]} checks on ${#gpu_ids[@]} GPUs with $cores cores, $SECONDS s after the start"
    run_checks || status=1
    {
        printf '{\n  "command": "%s", "date": "%s", "commit": "%s",\n' "${command//[\"\\]/}" "$(date +%F)" \
            "$(git -C "$root" rev-parse --short HEAD 2> /dev/null || echo "${COMMIT:-unknown}")"
        printf '  "gpu": "%s", "gpus": %d, "seconds": %d,\n  "checks": [\n' "$gpu_name" "${#gpu_ids[@]}" "$SECONDS"
        (IFS=$'\n' && echo "${check_rows[*]}") | sed 's/^/    /; $!s/$/,/'
        printf '  ]\n}\n'
    } > "$1"
    say "written: $1, $SECONDS s in all"
    return $status
}
