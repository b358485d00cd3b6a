#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Runs clang-tidy 14 (the list: .clang-tidy) on sources that every build has; configures build/cpu where it is missing.
# Usage: tidy.sh [--all | FILE...]
#   default  .cpp files of the program that differ from the merge base with origin/main, or that the last commit changed where there is no
#            origin/main or nothing differs; uncommitted changes too
#   --all    all of them, which takes tens of minutes on two cores
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

folders=(kernels/core kernels/ops kernels/comm kernels/reference layers bindings model)
files=("$@")
if [[ ${1:-} == --all ]]; then
    mapfile -t files < <(find "${folders[@]}" -name '*.cpp' | sort)
elif (($# == 0)); then
    base=$(git merge-base HEAD origin/main 2> /dev/null || true)
    if [[ -z $base || $base == "$(git rev-parse HEAD)" ]]; then base=$(git rev-parse -q --verify HEAD~1 || git rev-parse HEAD); fi
    mapfile -t files < <(git diff --name-only --diff-filter=d "$base" -- "${folders[@]}" | grep '\.cpp$' || true)
fi
if ((${#files[@]} == 0)); then say "clang-tidy: no changed file" && exit; fi

log=$(mktemp)
# flags of GCC that clang does not know are no findings; neither are its own warnings: GCC's are the build's
if ! printf '%s\0' "${files[@]}" | xargs -0 -n 4 -P "$(usable_cores)" "$tool" -p "$database" --quiet \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-error > "$log" 2>&1; then
    grep -E -A 3 'error:|warning:.*\[' "$log" | grep -v 'clang-diagnostic' >&2 || cat "$log" >&2
    die 1 "clang-tidy found the above"
fi
rm -f "$log"
say "clang-tidy: ${#files[@]} files clean"
