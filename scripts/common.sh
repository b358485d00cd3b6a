# SPDX-License-Identifier: MIT
# Functions shared by the scripts of this folder; sourced, never run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '== %s\n' "$*"; }
die() {  # die STATUS TEXT
    printf 'error: %s\n' "$2" >&2
    exit "$1"
}

# help_if_asked "$@": --help as the first argument prints the head of the script, and nothing else is done.
help_if_asked() {
    if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '3,${/^#/!q;s/^# \{0,1\}//p}' "$0" && exit; fi
}
# no_arguments "$@": of what is left, none means anything.
no_arguments() { (($# == 0)) || die 2 "unknown argument '$1' (${0##*/} --help)"; }

# CPU cores this process may use: affinity (nproc) and a container's CPU quota, whichever is less.
usable_cores() {
    local cores quota period limit
    cores=$(nproc)
    if [[ -r /sys/fs/cgroup/cpu.max ]]; then
        read -r quota period < /sys/fs/cgroup/cpu.max || true
    elif [[ -r /sys/fs/cgroup/cpu/cpu.cfs_quota_us ]]; then
        quota=$(cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us)
        period=$(cat /sys/fs/cgroup/cpu/cpu.cfs_period_us)
    fi
    if [[ ${quota:-} =~ ^[0-9]+$ && ${period:-0} -gt 0 ]]; then
        limit=$(((quota + period - 1) / period))
        if ((limit >= 1 && limit < cores)); then cores=$limit; fi
    fi
    echo "$cores"
}

# Device files, because /proc shows a host's GPUs to containers that were given none.
gpu_visible() { compgen -G '/dev/nvidia[0-9]*' > /dev/null; }

# The GPUs that a command here may use, a line each, as CUDA_VISIBLE_DEVICES names them.
visible_gpus() {
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then tr , '\n' <<< "$CUDA_VISIBLE_DEVICES"; else nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null || true; fi
}
# labels_beyond GPUS: a regular expression of the labels of tests that need more GPUs; starts with |.
labels_beyond() {
    local gpus
    for gpus in 2 4 8; do if ((gpus > $1)); then printf '|^gpus%d$' "$gpus"; fi; done
}
# resource_file FILE GPUS SLOTS: tells ctest how many GPUs are here, and how many tests may run on one at a time.
resource_file() {
    local gpu ids=''
    for ((gpu = 0; gpu < $2; ++gpu)); do ids+="${ids:+, }{\"id\": \"$gpu\", \"slots\": $3}"; done
    echo "{\"version\": {\"major\": 1, \"minor\": 0}, \"local\": [{\"gpus\": [$ids]}]}" > "$1"
}

# Prints why the CUDA toolkit cannot build the CUDA backend; nothing when it can.
cuda_toolkit_problem() { cmake -P "$root/cmake/CudaToolkit.cmake"; }

# Prints the prefix with dependencies (scripts/fetch_deps.sh) that builds use: $FP8FLOW_DEPS, else .deps; nothing where there is none.
deps_prefix() {
    local prefix=${FP8FLOW_DEPS:-$root/.deps}
    if [[ -d $prefix ]]; then
        (cd "$prefix" && pwd)
    elif [[ -n ${FP8FLOW_DEPS:-} ]]; then
        die 2 "FP8FLOW_DEPS: $FP8FLOW_DEPS is not a folder"
    fi
}

# configure PRESET: configures build/PRESET (CMakePresets.json), quietly unless it fails.
configure() {
    local folder=$root/build/$1 log prefix options=()
    log=$folder/configure.log
    mkdir -p "$folder"
    if command -v ccache > /dev/null; then
        options=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
        export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}  # without it ccache keeps nothing that reads precompiled headers
    fi
    prefix=$(deps_prefix) || exit
    if [[ -n $prefix ]]; then options+=("-DFP8FLOW_DEPS=$prefix"); fi
    say "configuring build/$1${prefix:+ with the libraries in $prefix}"
    if ! cmake -S "$root" --preset "$1" "${options[@]}" --no-warn-unused-cli > "$log" 2>&1; then
        cat "$log" >&2
        die 1 "cmake failed; its output is above and in $log"
    fi
}

# build PRESET [TARGET...]: builds build/PRESET with all usable cores.
build() {
    local started=$SECONDS targets=("${@:2}")
    say "building build/$1 with $(usable_cores) jobs"
    cmake --build "$root/build/$1" --parallel "$(usable_cores)" ${targets[0]:+--target "${targets[@]}"} || die 1 "the build failed"
    say "built in $((SECONDS - started)) s"
}
