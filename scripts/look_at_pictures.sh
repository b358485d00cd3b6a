#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Screenshots of the pictures (*.svg) and reports (*.html) of a folder, to be looked at: reports as wide as a phone (390 pixels) and
# a desktop (1280), in light and dark colours. Needs Chromium; exit status 77 where there is none.
# Usage: look_at_pictures.sh FOLDER [OUT]     OUT: a folder for the PNGs; default: FOLDER/screenshots
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

help_if_asked "$@"
if [[ ${1:-} == -* ]]; then no_arguments "$@"; fi
no_arguments "${@:3}"
[[ $# -ge 1 && -d $1 ]] || die 2 "want a folder with pictures, got ${1:-nothing}"
folder=$(cd "$1" && pwd)
out=${2:-$folder/screenshots}
mkdir -p "$out"
out=$(cd "$out" && pwd)
browser=""
for candidate in chromium chromium-browser google-chrome; do
    command -v "$candidate" > /dev/null && browser=$candidate && break
done
[[ -n $browser ]] || { echo "look_at_pictures.sh: no Chromium here" >&2; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# shoot FILE NAME WIDTH HEIGHT SCHEME: a frame has the size that is asked for; a window may be wider, and its page is lower than itself
shoot() {
    local scheme=1
    [[ $5 == dark ]] && scheme=0
    cat > "$work/frame.html" << END
<!doctype html><meta name="color-scheme" content="light dark"><body style="margin:0">
<iframe src="file://$1" style="border:0;width:$3px;height:$4px"></iframe>
END
    "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files \
        --user-data-dir="$work/profile" --blink-settings=preferredColorScheme=$scheme --virtual-time-budget=4000 \
        --window-size="$(($3 < 500 ? 500 : $3)),$(($4 + 160))" --screenshot="$out/$2" "file://$work/frame.html" 2> "$work/log" \
        || { cat "$work/log" >&2; die 1 "$browser took no picture of $1"; }
    echo "$out/$2"
}

shopt -s nullglob
for file in "$folder"/*.svg; do
    name=$(basename "$file" .svg)
    size() { sed -n "1s/.* $1=\"\([0-9]*\)\".*/\1/p" "$file"; }
    for scheme in light dark; do
        shoot "$file" "$name.$scheme.png" "$(size width)" "$(size height)" $scheme
    done
done
for file in "$folder"/*.html; do
    name=$(basename "$file" .html)
    shoot "$file" "$name.390.light.png" 390 "${HEIGHT:-5200}" light
    shoot "$file" "$name.390.dark.png" 390 "${HEIGHT:-5200}" dark
    shoot "$file" "$name.1280.light.png" 1280 "${HEIGHT:-3600}" light
    shoot "$file" "$name.1280.dark.png" 1280 "${HEIGHT:-3600}" dark
done
