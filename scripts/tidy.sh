#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Runs clang-tidy 14 (the list: .clang-tidy) on the sources that every build has; configures build/cpu where it is not yet.
# Usage: tidy.sh [--all | FILE...]     default: layers and the kernels' core, operations and ranks (CI's time allows no more);
#                                      --all: model and the reference backend too
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
if [[ ${1:-} == -* && $1 != --all ]]; then no_arguments "$@"; fi
if [[ ${1:-} == --all ]]; then no_arguments "${@:2}"; fi

version=14
tool=clang-tidy-$version
command -v "$tool" > /dev/null || die 2 "clang-tidy $version is not installed (scripts/setup_deps.sh tidy)"
cd "$root"
# not cuda-check's: there the sources of a folder are one
database=build/cpu
if [[ ! -f $database/compile_commands.json ]]; then configure cpu; fi

folders=(kernels/core kernels/ops kernels/comm layers bindings)
case ${1:-} in
    "") ;;
    --all) folders+=(kernels/reference model); shift ;;
    *) folders=() ;;
esac
files=("$@")
if ((${#folders[@]} > 0)); then mapfile -t files < <(find "${folders[@]}" -name '*.cpp' | sort); fi

log=$(mktemp)
# flags of GCC that clang does not know are no findings; neither are its own warnings: GCC's are the build's
if ! printf '%s\0' "${files[@]}" | xargs -0 -n 4 -P "$(usable_cores)" "$tool" -p "$database" --quiet \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-error > "$log" 2>&1; then
    grep -E -A 3 'error:|warning:.*\[' "$log" | grep -v 'clang-diagnostic' >&2 || cat "$log" >&2
    die 1 "clang-tidy found the above"
fi
rm -f "$log"
say "clang-tidy: ${#files[@]} files clean"
