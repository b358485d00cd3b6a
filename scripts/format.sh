#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Formats all C++ and CUDA sources in place with clang-format 14; with --check, only names the files that differ.
# Another major version formats differently, so none is accepted.
# Usage: format.sh [--check]
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
check=no
if [[ ${1:-} == --check ]]; then check=yes && shift; fi
no_arguments "$@"

version=14
tool=""
for candidate in "clang-format-$version" clang-format; do
    if command -v "$candidate" > /dev/null && [[ $("$candidate" --version) == *"version $version."* ]]; then
        tool=$candidate
        break
    fi
done
[[ -n $tool ]] || die 2 "clang-format $version is not installed (scripts/setup_deps.sh format)"

cd "$root"
mapfile -d '' files < <(find kernels layers bindings model tests include examples -type f \( -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z)
if [[ $check == no ]]; then
    "$tool" -i "${files[@]}"
    say "formatted ${#files[@]} files"
elif ! "$tool" --dry-run --Werror "${files[@]}" > /dev/null 2>&1; then
    for file in "${files[@]}"; do
        "$tool" --dry-run --Werror "$file" > /dev/null 2>&1 || echo "not formatted: $file"
    done
    die 1 "run scripts/format.sh"
else
    say "format: ${#files[@]} files as clang-format $version wants them"
fi
