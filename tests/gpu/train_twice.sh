#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Trains twice with the same seed: losses and gradient norms of all iterations must have the same bits.
# Usage: train_twice.sh FOLDER COMMAND...    COMMAND: mpirun ... fp8flow train CONFIG ..., without --out
set -euo pipefail

out=$1
shift
for run in first second; do
    "$@" --out "$out/$run" --overwrite
    grep -oE '"(iteration|lm_loss|grad_norm)":[^,}]*' "$out/$run/metrics.jsonl" > "$out/$run.txt"
done
cmp "$out/first.txt" "$out/second.txt"
echo "the same bits twice: $(grep -c lm_loss "$out/first.txt") iterations"
