#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Writes docs/configuration.md from what the program says of its keys (fp8flow --help-config).
# Usage: make_configuration_doc.sh [--check] [PROGRAM [FILE]]
#   --check   writes nothing; exit status 1, and the difference, where FILE is not what PROGRAM says
#   PROGRAM   default: the newest of build/{cuda-release,cuda-check,cpu}/fp8flow
#   FILE      default: docs/configuration.md
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
check=no
if [[ ${1:-} == --check ]]; then check=yes && shift; fi
if [[ ${1:-} == -* ]]; then no_arguments "$@"; fi
no_arguments "${@:3}"
program=${1:-}
for built in "$root"/build/{cuda-release,cuda-check,cpu}/fp8flow; do
    if [[ -z ${1:-} && -x $built && (-z $program || $built -nt $program) ]]; then program=$built; fi
done
[[ -x $program ]] || die 2 "no program: build it, or name it"
file=${2:-$root/docs/configuration.md}

# Sections begin a line, keys follow two blanks, what is said of a key six.
document() {
    "$program" --help-config | awk '
        function escaped(text) { gsub(/\|/, "\\|", text); return text }
        function finish() {
            if (key == "") return
            if (recipes != "") meaning = meaning ". Recipes: " recipes
            printf "| `%s` | %s | %s | %s |\n", key, escaped(type), value, escaped(meaning)
            key = ""
        }
        NR == 1 {
            print "# Configuration"
            print ""
            print "<!-- Written by scripts/make_configuration_doc.sh from `fp8flow --help-config`; do not edit. -->"
            print ""
            print "A configuration is a YAML file of sections with keys. A key that is left out has its default;"
            print "`--set section.key=value` on the command line overrides the file and may be repeated. Leaf names are"
            print "those of Megatron-LM where it has the key. An unknown key, a value out of range or two keys that"
            print "contradict each other end the run before it starts (exit status 2) with file, line, what was got,"
            print "what is wanted, and the nearest known name. A run writes all keys, defaults included, to"
            print "`config.yaml` below its output folder. An integer may be written 5000 or 5e3, a list [a, b]; YAML'\''s"
            print "other spellings (True, 0x10, tabs between tokens) are read too. Integers end at 2^53, seeds at 2^63."
            print "A number is refused where FP32 would round it to 0, to infinity, or to a bound that is not legal."
            print ""
            print "Keys of Megatron-LM that have one legal value here (`swiglu: true`, `optimizer: adam`,"
            print "`tensor_model_parallel_size: 1`, ...) are accepted with that value, so that a configuration written for"
            print "Megatron-LM fails where it asks for something else. A key with recipes may differ from its default"
            print "under these recipes only."
            next
        }
        /^[a-z]+:$/ {
            finish()
            section = substr($0, 1, length($0) - 1)
            printf "\n## %s\n\n| key | values | default | meaning |\n|---|---|---|---|\n", section
            next
        }
        /^  [a-z]/ {
            finish()
            at = index($0, ": ")
            key = substr($0, 3, at - 3)
            type = substr($0, at + 2)
            meaning = recipes = value = ""
            if (match(type, /; default /)) {
                value = "`" substr(type, RSTART + RLENGTH) "`"
                type = substr(type, 1, RSTART - 1)
            }
            next
        }
        /^      recipes: / { recipes = substr($0, 16); next }
        /^      / { meaning = meaning (meaning == "" ? "" : " ") substr($0, 7) }
        END { finish() }'
}

if [[ $check == no ]]; then
    document > "$file.tmp" && mv "$file.tmp" "$file"
    say "written: $file"
elif ! difference=$(diff -u "$file" <(document)); then
    printf '%s\n' "$difference" >&2
    die 1 "$file is not what the program says; run scripts/make_configuration_doc.sh"
fi
