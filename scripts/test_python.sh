#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Installs the Python package (python/) into a virtual environment and runs its tests, then examples/pytorch/train_qwen3_moe.py. Outside
# CI's time: a whole build of the library is part of it. Needs a Python with torch >= 2.7, and for the layer's tests transformers >= 5;
# pip fetches pytest and scikit-build-core where the environment has none. GPU kernels are built where a GPU is.
# Usage: test_python.sh [--library FILE] [arguments for pytest: -k, -m, -x, -v, -s or --lf first]
#   --library  this libfp8flow.so of a build instead of installing anything, and the tests alone
#   PYTHON     the interpreter, default python3; FP8FLOW_DEPS as for test.sh
# Exit status 77 where torch or pytest is missing.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
library='' python=${PYTHON:-python3}
if [[ ${1:-} == --library ]]; then
    (($# >= 2)) || die 2 "$1: a value is missing"
    library=$2
    shift 2
elif [[ ${1:-} == --* && $1 != --lf ]]; then
    no_arguments "$@"
fi
missing() { "$1" -c "import $2" 2> /dev/null || die 77 "$1 has no $2: $3"; }
missing "$python" torch "nothing is tested"
export OMP_WAIT_POLICY=passive

if [[ -n $library ]]; then
    missing "$python" pytest "nothing is tested"
    FP8FLOW_LIBRARY=$library PYTHONPATH=$root/python exec "$python" -m pytest -q -p no:cacheprovider "$root/python/tests" "$@"
fi

work=$root/build/python
venv=$work/venv/bin/python
"$python" -m venv --clear "$work/venv"
# what the interpreter has, where it is a virtual environment itself, too
"$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$("$venv" -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
"$venv" -m pip install --quiet pytest scikit-build-core ninja
options=(-Cbuild-dir="$work/cmake")
prefix=$(deps_prefix) || exit
if [[ -n $prefix ]]; then options+=("-Ccmake.define.FP8FLOW_DEPS=$prefix"); fi
if command -v ccache > /dev/null; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
fi
say "pip install ./python"
CMAKE_BUILD_PARALLEL_LEVEL=$(usable_cores) "$venv" -m pip install --quiet --no-deps --no-build-isolation "${options[@]}" "$root/python"
say "installed in $SECONDS s"

cd "$work" # python/fp8flow is not importable from here
"$venv" -m pip list 2> /dev/null | grep -iE '^(torch|transformers) ' || true
status=0
"$venv" -m pytest -q -p no:cacheprovider "$root/python/tests" "$@" || status=1
if "$venv" -c 'import transformers' 2> /dev/null; then
    "$venv" "$root/examples/pytorch/train_qwen3_moe.py" || status=1
else
    say "transformers is missing: MoELayer is not compared with its blocks, and the example does not run"
fi
exit "$status"
