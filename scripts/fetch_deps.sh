#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Prepares a prefix with the libraries that fp8flow is built from, for machines where nobody may install packages and for clusters without
# a network: yaml-cpp, nlohmann-json, CLI11, fmt, GoogleTest, and cudnn-frontend (attention on cuDNN). MPI, a compiler, CMake and Ninja stay
# the machine's own. The sources are the projects' release archives, checked against the sums below before anything is unpacked.
# Usage: fetch_deps.sh [--prefix DIR] [--from DIR] [--download-only]
#   --prefix DIR      where to install (default: .deps next to this repository's CMakeLists.txt, or $FP8FLOW_DEPS)
#   --from DIR        take the archives from this folder instead of the network
#   --download-only   get and check the archives (into PREFIX/archives), build nothing
# scripts/train.sh, test.sh and gpu_check.sh use .deps or $FP8FLOW_DEPS by themselves; by hand:
#   cmake --preset cuda-release -DFP8FLOW_DEPS=.deps
# Without a network: elsewhere `fetch_deps.sh --download-only`, copy the folder .deps/archives, here `fetch_deps.sh --from archives`.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# name | archive | SHA-256 | where from | CMake options; "headers" instead of options: its include folder is copied
packages=(
    "fmt|fmt-9.1.0.tar.gz|5dea48d1fcddc3ec571ce2058e13910a0d4a6bab4cc09a809d8b1dd1c88ae6f2|https://github.com/fmtlib/fmt/archive/refs/tags/9.1.0.tar.gz|-DFMT_TEST=OFF -DFMT_DOC=OFF"
    "yaml-cpp|yaml-cpp-0.8.0.tar.gz|fbe74bbdcee21d656715688706da3c8becfd946d92cd44705cc6098bb23b3a16|https://github.com/jbeder/yaml-cpp/archive/refs/tags/0.8.0.tar.gz|-DYAML_CPP_BUILD_TESTS=OFF -DYAML_CPP_BUILD_TOOLS=OFF"
    "nlohmann-json|json-3.11.3.tar.gz|0d8ef5af7f9794e3263480193c491549b2ba6cc74bb018906202ada498a79406|https://github.com/nlohmann/json/archive/refs/tags/v3.11.3.tar.gz|-DJSON_BuildTests=OFF"
    "CLI11|CLI11-2.5.0.tar.gz|17e02b4cddc2fa348e5dbdbb582c59a3486fa2b2433e70a0c3bacb871334fd55|https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.5.0.tar.gz|-DCLI11_BUILD_TESTS=OFF -DCLI11_BUILD_EXAMPLES=OFF -DCLI11_BUILD_DOCS=OFF"
    "GoogleTest|googletest-1.14.0.tar.gz|8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7|https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz|-DBUILD_GMOCK=OFF"
    "cudnn-frontend|cudnn-frontend-1.18.0.tar.gz|122dde9e9ee37cc05d626097b3c85d507be0db3f73ee196baa5a034069460517|https://github.com/NVIDIA/cudnn-frontend/archive/refs/tags/v1.18.0.tar.gz|headers"
)

help_if_asked "$@"
prefix=${FP8FLOW_DEPS:-$root/.deps} from="" download_only=no
while (($# > 0)); do
    case $1 in
        --prefix | --from)
            [[ -n ${2:-} ]] || die 2 "$1: its value is missing"
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        --download-only) download_only=yes && shift ;;
        *) no_arguments "$@" ;;
    esac
done
mkdir -p "$prefix/archives"
prefix=$(cd "$prefix" && pwd)
store=$prefix/archives
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# sum_is FILE SUM
sum_is() { [[ -f $1 && $(sha256sum "$1" | cut -d ' ' -f 1) == "$2" ]]; }

download() {  # download URL FILE
    if command -v curl > /dev/null; then
        curl --fail --location --silent --show-error --proto '=https' --retry 3 --max-time 300 -o "$2" "$1"
    elif command -v wget > /dev/null; then
        wget --https-only --quiet --tries=3 --timeout=300 -O "$2" "$1"
    else
        die 2 "neither curl nor wget is here; use --from DIR"
    fi
}

for package in "${packages[@]}"; do
    IFS='|' read -r name file sum url _ <<< "$package"
    if sum_is "$store/$file" "$sum"; then continue; fi
    if [[ -n $from ]]; then
        [[ -f $from/$file ]] || die 2 "$name: $file is not in $from"
        cp "$from/$file" "$work/$file"
    else
        say "getting $name from $url"
        download "$url" "$work/$file" ||
            die 2 "$name: no download; on a machine with a network: fetch_deps.sh --download-only, here: --from its archives"
    fi
    sum_is "$work/$file" "$sum" ||
        die 2 "$name: $file has SHA-256 $(sha256sum "$work/$file" | cut -d ' ' -f 1), want $sum; nothing of it was unpacked"
    mv "$work/$file" "$store/$file"
done
say "archives checked: $store"

[[ $download_only == no ]] || exit 0

for package in "${packages[@]}"; do
    IFS='|' read -r name file sum _ options <<< "$package"
    stamp=$prefix/.installed-$name
    if [[ -f $stamp && $(< "$stamp") == "$sum $options" ]]; then continue; fi
    say "building $name"
    source=$work/$name
    mkdir "$source"
    tar -xzf "$store/$file" -C "$source" --strip-components=1 --no-same-owner
    if [[ $options == headers ]]; then
        mkdir -p "$prefix/include"
        cp -r "$source/include/." "$prefix/include/"
    else
        log=$work/$name.log
        # shellcheck disable=SC2086  # options are words
        if ! { cmake -S "$source" -B "$work/build-$name" -DCMAKE_BUILD_TYPE=Release -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
            -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib -DBUILD_SHARED_LIBS=OFF -DCMAKE_POLICY_VERSION_MINIMUM=3.5 \
            --no-warn-unused-cli $options &&
            cmake --build "$work/build-$name" --parallel "$(usable_cores)" &&
            cmake --install "$work/build-$name"; } > "$log" 2>&1; then
            tail -n 30 "$log" >&2
            die 1 "$name: the build failed; its last lines are above"
        fi
    fi
    echo "$sum $options" > "$stamp"
done
touch "$prefix/.complete"  # setup_deps.sh installs no library packages where this file exists
say "installed in $prefix; cmake --preset cuda-release -DFP8FLOW_DEPS=$prefix"
