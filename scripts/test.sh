#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Sets up, builds everything and runs the tests, except those labelled slow. The CUDA backend is built wherever nvcc >= 12.9 works:
# into build/cuda-release where a GPU is, into build/cuda-check where its kernels are only compiled.
# Usage: test.sh [--slow | --preset PRESET] [arguments for ctest]     e.g. test.sh -L unit, test.sh -R permute
#   --slow    those labelled slow, and only they
#   --preset  without fuzz targets, in build/PRESET, hours on two cores:
#             asan      AddressSanitizer, UndefinedBehaviorSanitizer; leaks of tests that start no MPI
#             tsan      ThreadSanitizer; without tests that start MPI, because its library is not instrumented
#             coverage  prints the executed lines and branches where gcovr is installed
# Of ctest's: -R -E -L -LE -j --repeat --timeout with a value; -V -VV -N --rerun-failed --stop-on-failure
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
wanted=(-LE 'slow|sanitizer|bench|faults')
preset=''
if [[ ${1:-} == --slow ]]; then wanted=(-L slow) && shift; fi
if [[ ${1:-} == --preset ]]; then
    preset=${2:-}
    wanted[1]+='|fuzz'
    case $preset in
        asan) ;;
        # teams of one: GCC's OpenMP runtime is not instrumented, and counts that threads share are lost or slow
        tsan) wanted[1]+='|mpi|cli' && export OMP_THREAD_LIMIT=1 TSAN_OPTIONS='halt_on_error=0 exitcode=66' ;;
        coverage) export OMP_THREAD_LIMIT=1 GCOV_ERROR_FILE=/dev/null ;; # counts that a killed process left half written
        *) die 2 "--preset: got '$preset', want asan, tsan or coverage" ;;
    esac
    shift 2
fi
arguments=("$@")
while (($# > 0)); do  # before an hour of building; ctest says nothing of what it does not know
    case $1 in
        -R | -E | -L | -LE | -j | --repeat | --timeout)
            (($# >= 2)) || die 2 "$1: a value is missing"
            shift 2
            ;;
        -V | -VV | -N | --rerun-failed | --stop-on-failure) shift ;;
        *) no_arguments "$@" ;;
    esac
done

"$root/scripts/setup_deps.sh" build

if [[ -z $preset ]]; then
    preset=cuda-check
    if gpu_visible; then preset=cuda-release; fi
    problem=$(cuda_toolkit_problem)
    if [[ -n $problem ]]; then
        say "the CUDA backend is not built: $problem"
        preset=cpu
    fi
fi
configure "$preset"
build "$preset"

gpus=$(visible_gpus | wc -l)
if [[ ${wanted[0]} == -LE ]]; then wanted[1]+=$(labels_beyond "$gpus"); fi
if ((gpus > 0)); then
    resource_file "$root/build/$preset/gpus.json" "$gpus" 1
    wanted+=(--resource-spec-file "$root/build/$preset/gpus.json")
fi

say "running the tests (${wanted[*]})"
log=$root/build/$preset/ctest.log
status=0
ctest --test-dir "$root/build/$preset" -j "$(usable_cores)" --output-on-failure --no-tests=error "${wanted[@]}" "${arguments[@]}" 2>&1 |
    tee "$log" || status=$?

count() { grep -c "$1" "$log" || true; }
passed=$(count '^ *[0-9]*/[0-9]* Test .* Passed ')
skipped=$(count '^ *[0-9]*/[0-9]* Test .*\*\*\*Skipped ')
total=$(count '^ *[0-9]*/[0-9]* Test ')
say "$SECONDS s in all, build included"
if ((skipped > 0)); then
    reason="skipped: no device"
    if gpu_visible; then reason="skipped (ctest -V says why)"; fi
    grep '\*\*\*Skipped ' "$log" | sed -E "s/.*: ([A-Za-z0-9_.]+) .*/   \1: $reason/"
fi
if [[ $preset == coverage ]] && command -v gcovr > /dev/null; then
    gcovr --root "$root" --filter kernels/ --filter layers/ --filter model/ --exclude-throw-branches "$root/build/coverage"
fi
echo "tests: $passed passed, $((total - passed - skipped)) failed, $skipped skipped"
exit "$status"
