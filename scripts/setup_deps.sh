#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Installs the distribution's packages that fp8flow is built from (Debian 12, Ubuntu 24.04), if any is missing.
# Usage: setup_deps.sh [build] [format] [tidy]     (default: build)
# When nothing is missing it does nothing and needs no network. Without root and without passwordless sudo it prints the
# line to run and exits with status 2. FP8FLOW_SKIP_SETUP=1 skips the check (for toolchains that are not from packages); libraries that
# fetch_deps.sh has put into a prefix are not installed.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
build_packages=(cmake ninja-build g++ openmpi-bin libopenmpi-dev)
libraries=(libfmt-dev libyaml-cpp-dev nlohmann-json3-dev libcli11-dev libgtest-dev)
format_packages=(clang-format-14)
tidy_packages=(clang-tidy-14)

prefix=$(deps_prefix) || exit
if [[ ! -f $prefix/.complete ]]; then build_packages+=("${libraries[@]}"); fi
wanted=()
for group in "${@:-build}"; do
    case $group in
        build) wanted+=("${build_packages[@]}") ;;
        format) wanted+=("${format_packages[@]}") ;;
        tidy) wanted+=("${tidy_packages[@]}") ;;
        *) die 2 "unknown argument '$group' (want build, format or tidy)" ;;
    esac
done

if [[ ${FP8FLOW_SKIP_SETUP:-0} == 1 ]]; then exit 0; fi
if ! command -v dpkg-query > /dev/null || ! command -v apt-get > /dev/null; then
    say "not a Debian or Ubuntu system: not checking for ${wanted[*]}"
    exit 0
fi

missing=()
for package in "${wanted[@]}"; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
    if [[ $state != installed ]]; then missing+=("$package"); fi
done
if ((${#missing[@]} == 0)); then exit 0; fi

install=(apt-get install -y --no-install-recommends "${missing[@]}")
sudo=()
if (($(id -u) != 0)); then
    if command -v sudo > /dev/null && sudo -n true 2> /dev/null; then
        sudo=(sudo -n)
    else
        say "missing packages: ${missing[*]}"
        say "run this as a user who may install packages, then start again:"
        echo "sudo apt-get update && sudo ${install[*]}"
        exit 2
    fi
fi

say "installing with apt-get: ${missing[*]}"
log=$(mktemp)
if ! { "${sudo[@]}" apt-get update && "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive "${install[@]}"; } > "$log" 2>&1; then
    tail -n 30 "$log" >&2
    die 2 "apt-get failed (log: $log); the line was: apt-get update && ${install[*]}"
fi
rm -f "$log"
say "installed ${#missing[@]} packages and what they depend on"
