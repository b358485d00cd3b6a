#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares the machine code (SASS) of two builds kernel by kernel, whatever the kernels are called: for moves and renames.

usage: compare_machine_code.py OLD NEW      objects (.cu.o), archives (libfp8flow_hopper.a) or programs

Names of functions and symbols are left out, so that a namespace or a folder may change; everything else of a function's
listing counts. Prints the kernels of each side that have no equal on the other, by demangled name and number of lines.
Exit status: 0 equal, 1 not, 2 usage. Needs cuobjdump and c++filt. Registers and shared memory: cuobjdump -res-usage.
"""
import argparse
import collections
import hashlib
import os
import re
import shutil
import subprocess
import sys

HEADER = re.compile(r"\s*(Fatbin|=====|arch\b|code version|host\b|compile_size|compressed|identifier|producer|\.headerflags|member\b)")


def kernels(path):
    """[(name, digest of the listing, lines)] of a file."""
    listing = subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    found, name, body = [], None, []

    def close():
        if name is not None:
            found.append((name, hashlib.sha1("\n".join(body).encode()).hexdigest(), len(body)))

    for line in listing.split("\n"):
        function = re.match(r"\s*Function : (\S+)", line)
        if function:
            close()
            name, body = function.group(1), []
        elif name is not None and line.strip() and not HEADER.match(line):
            body.append(" ".join(re.sub(r"`\(\S+?\)", "`()", line).split()))
    close()
    return found


def demangled(names):
    if not names:
        return []
    out = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return out.rstrip("\n").split("\n")


def without_equal(these, others):
    left = collections.Counter(digest for _, digest, _ in others)
    alone = []
    for name, digest, lines in these:
        if left[digest] > 0:
            left[digest] -= 1
        else:
            alone.append((name, lines))
    return alone


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    options = parser.parse_args()
    os.environ["PATH"] += os.pathsep + "/usr/local/cuda/bin"  # where the toolkit's installers put it
    for tool in ("cuobjdump", "c++filt"):
        if shutil.which(tool) is None:
            print(f"error: {tool} is not on PATH", file=sys.stderr)
            return 2
    old, new = kernels(options.old), kernels(options.new)
    if not old or not new:
        print(f"error: no kernels in {options.new if old else options.old}", file=sys.stderr)
        return 2
    gone, added = without_equal(old, new), without_equal(new, old)
    print(f"{len(old)} kernels before, {len(new)} after: {len(gone)} before without an equal after, "
          f"{len(added)} after without an equal before")
    for side, alone in (("before", gone), ("after", added)):
        for (_, lines), name in zip(alone, demangled([name for name, _ in alone])):
            print(f"{side}: {lines:6d} lines  {name}")
    return 1 if gone or added else 0


if __name__ == "__main__":
    sys.exit(main())
