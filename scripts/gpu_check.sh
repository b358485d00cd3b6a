#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Builds and runs the GPU tests on a machine with Hopper GPUs: tests of ctest with labels (cmake/GpuTests.cmake, GpuRuns.cmake), one test at a
# time per GPU, each with a time limit. Prints a summary, and writes gpu_check.json and the tests' output (tests.log) into FOLDER. Exit status 1 if
# a test failed. Installs nothing (dependencies: scripts/setup_deps.sh, fetch_deps.sh).
# Usage: gpu_check.sh [--label REGEX] [--only REGEX] [--skip REGEX] [--share RANKS] [--slots N] [--budget SECONDS] [--resume FILE] [--list] [FOLDER]
#   --label   gpu (tests of one GPU), multi-gpu (2, 4 or 8 ranks), sanitizer, bench, faults; default: gpu|multi-gpu|sanitizer
#   --only    only tests with a name that matches, e.g. gemm; '_2$': those with two ranks. Without --label of any label
#   --skip    without tests with a name that matches
#   --share   tests of so many ranks (4 or 8), more than there are GPUs, which share them: bits and the exchange over peer memory
#   --slots   so many tests at once on each GPU, those of one GPU only: the sanitizers of a machine in minutes (6) instead of hours
#   --budget  no test starts later than this after the start, build included, and none runs on
#   --resume  tests that passed are noted in FILE; tests noted there for the same sources and kind of GPU are not run again
#   --list    prints the selected tests, and builds and runs nothing
#   FOLDER    default runs/gpu_check
# Examples: --label gpu; --label multi-gpu --only '_2$' (two ranks, with the golden runs); --label sanitizer --slots 6; --label bench --only deepseek_v3.*_4
# The golden runs are compared with tests/golden/hopper.json. To write that file again:
#   FP8FLOW_GOLDEN=write ./scripts/gpu_check.sh --only Golden.Hopper
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
command="./scripts/gpu_check.sh${*:+ $*}"
label='' only='' skip='' share='' slots=1 budget='' resume='' list='' out=$root/runs/gpu_check
while (($# > 0)); do
    case $1 in
        --label | --only | --skip | --share | --slots | --budget | --resume)
            (($# >= 2)) || die 2 "$1: a value is missing"
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        --list) list=yes ;;
        -*) no_arguments "$@" ;;
        *) out=$1 ;;
    esac
    shift
done
[[ $budget =~ ^[0-9]*$ ]] || die 2 "--budget: got '$budget', want seconds"
[[ $slots =~ ^[1-9][0-9]*$ ]] || die 2 "--slots: got '$slots', want a number of tests"
[[ $share =~ ^[48]?$ ]] || die 2 "--share: got '$share', want 4 or 8 ranks"

mapfile -t gpus < <(visible_gpus)
((${#gpus[@]} > 0)) || die 2 "no GPU is visible here"
problem=$(cuda_toolkit_problem)
[[ -z $problem ]] || die 2 "the CUDA backend cannot be built: $problem"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)
build=$root/build/cuda-release
configure cuda-release
machine="${#gpus[@]} x $gpu, $(usable_cores) CPU cores, $("$(sed -n 's/^FP8FLOW_NVCC:INTERNAL=//p' "$build/CMakeCache.txt")" --version 2> /dev/null | sed -n 's/.*, V/nvcc /p' || true)"
mkdir -p "$out"

# ---- which tests: by label, name, and the GPUs that are here
ranks=$((slots > 1 ? 1 : ${#gpus[@]}))
if [[ -n $share ]]; then
    ranks=$share slots=$(((share + ${#gpus[@]} - 1) / ${#gpus[@]}))
    only=${only:-"(checkpoint_gpu_test|exchange.*[.](peer|levels)|Golden.*(Schedules|Graphs|SavedRows|Invariant|DividedStateC|Recompute).*)_$share\$"}
    export FP8FLOW_SHARE_GPUS=1
fi
if [[ -z $label && -z $only ]]; then label='gpu|multi-gpu|sanitizer'; fi
select=(-LE "no label$(labels_beyond "$ranks")" -L "^(${label:-gpu|multi-gpu|sanitizer|bench|faults})\$" -R "${only:-.}")
key=$(cd "$root" && find CMakeLists.txt cmake configs include kernels layers model tests -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16)
key+=-${gpu//[^A-Za-z0-9.]/_}
if [[ -n $resume ]]; then
    passed=$(touch "$resume" && sed -n "s/^$key //p" "$resume" | paste -sd '|')
    skip=${skip:+$skip${passed:+|}}${passed:+^($passed)\$}
fi
if [[ -n $skip ]]; then select+=(-E "$skip"); fi
chosen=$(ctest --test-dir "$build" "${select[@]}" --show-only=json-v1)
if [[ -n $list ]]; then ctest --test-dir "$build" "${select[@]}" --show-only && exit; fi

# ---- build what they run, then run them
mapfile -t targets < <(grep -oE "\"$build/(tests/)?[A-Za-z0-9_.]+\"" <<< "$chosen" | tr -d '"' | sed -E 's|.*/||; s/libfp8flow\.so.*/fp8flow_shared/; s/^lib(.*)\.so$/\1/' | sort -u)
((${#targets[@]} > 0)) || die 2 "no test is selected"
if [[ " ${targets[*]} " == *" fp8flow "* ]]; then targets+=(fp8flow_faults); fi
build cuda-release "${targets[@]}"
resource_file "$build/gpus.json" "${#gpus[@]}" "$slots"
export FP8FLOW_THREADS_PER_GPU=$(($(usable_cores) / ${#gpus[@]} > 0 ? $(usable_cores) / ${#gpus[@]} : 1))
run=(-j "$((${#gpus[@]} * slots))" --output-on-failure --output-junit "$(cd "$out" && pwd)/junit.xml" --no-tests=error --resource-spec-file "$build/gpus.json")
if [[ -n $budget ]]; then run+=(--stop-time "$(date -d "$((budget > SECONDS ? budget - SECONDS : 1)) seconds" +%T)"); fi
say "$machine"
status=0
ctest --test-dir "$build" "${select[@]}" "${run[@]}" 2>&1 | tee "$out/ctest.log" || status=1
cp "$build/Testing/Temporary/LastTest.log" "$out/tests.log"

# ---- what became of them: lines NAME RESULT SECONDS
late=failed
if [[ -n $budget ]] && ((SECONDS >= budget)); then late=not_run; fi  # a test that the budget ended says nothing
timeouts=$(sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) .*\*\*\*Timeout.*/\1/p' "$out/ctest.log" | tr '\n' ' ')
awk -F'"' -v late=$late -v timeouts=" $timeouts" '
    /<testcase/ { name = $2; seconds = $6; result[name] = $8 == "run" ? "passed" : index(timeouts, " " name " ") ? late : "failed"; took[name] = seconds; order[++n] = name }
    /<skipped message="SKIP/ { result[name] = "not_run" }
    END { for (i = 1; i <= n; ++i) printf "%s %s %.2f\n", order[i], result[order[i]], took[order[i]] }' "$out/junit.xml" > "$out/results"
if ! grep -q ' failed ' "$out/results" && [[ $late == not_run ]]; then status=0; fi
if [[ -n $resume ]]; then awk -v key="$key" '$2 == "passed" { print key, $1 }' "$out/results" >> "$resume"; fi
awk -v command="${command//[\"\\]/}" -v date="$(date +%F)" -v machine="$machine" -v seconds="$SECONDS" \
    -v commit="$(git -C "$root" rev-parse --short HEAD 2> /dev/null || echo "${COMMIT:-unknown}")" -v gpu="${gpu%%,*}" -v gpus="${#gpus[@]}" '
    BEGIN { printf "{\"command\": \"%s\", \"date\": \"%s\", \"commit\": \"%s\",\n \"machine\": \"%s\", \"gpu\": \"%s\", \"gpus\": %d, \"seconds\": %d,\n \"checks\": [",
            command, date, commit, machine, gpu, gpus, seconds }
    { sub("_", " ", $2); printf "%s\n  {\"check\": \"%s\", \"result\": \"%s\", \"seconds\": %s}", (NR > 1 ? "," : ""), $1, $2, $3 }
    END { print "\n ]}" }' "$out/results" > "$out/gpu_check.json"
count() { grep -c " $1 " "$out/results" || true; }
say "$(count passed) passed, $(count failed) failed, $(count not_run) not run, of $(ctest --test-dir "$build" "${select[@]}" -N | sed -n 's/^Total Tests: //p') selected; $SECONDS s with the build"
say "$out: gpu_check.json, ctest.log (output of failed tests), tests.log (of all)"
exit $status
