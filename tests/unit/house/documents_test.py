#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Links of Markdown files lead to a file, and to a heading where they name one; files in code spans exist; the README is short; the version is the
same wherever it is written. Each rule must find a planted violation first."""

import os
import re
import sys

ROOT = sys.argv[1]
MAX_README = 150
LEFT_OUT = re.compile(r"\.git|runs|\.deps|\.cache|build.*")  # folders at the top without sources
NAMED = re.compile(r"`(?:\./)?((?:scripts|configs|docs|kernels|layers|model|tests)/[a-z0-9_./-]+\.[a-z]+)[ `]")
VERSIONS = {"CMakeLists.txt": r"^project\(fp8flow VERSION ([0-9.]+)", "CITATION.cff": r'^version: "?([^" \n]+)', "CHANGELOG.md": r"^## \[?([0-9.]+)"}


def prose_of(text):
    """The lines outside code blocks; those inside are empty."""
    code, lines = False, []
    for line in text.splitlines():
        fence = line.lstrip(" ").startswith("```")
        code ^= fence
        lines.append("" if fence or code else line)
    return lines


def anchors_of(text):
    """What headings are linked by: lower case, spaces become hyphens, other signs go."""
    headings = re.findall(r"^#{1,6} +(.*[^ ]) *$", "\n".join(prose_of(text)), re.M)
    return {re.sub(r"[^\w-]", "", heading.replace(" ", "-")).lower() for heading in headings}


def link_problem(texts, files, document, link):
    if re.match(r"[a-z]+:", link):
        return ""  # https:, mailto:
    target, _, anchor = link.partition("#")
    path = target.lstrip("/") if target.startswith("/") else os.path.join(os.path.dirname(document), target)
    file = os.path.normpath(path) if target else document
    if file not in files:
        return "no such file"
    return "no such heading" if anchor and file in texts and anchor not in anchors_of(texts[file]) else ""


def problems_of(texts, files):
    problems = []
    for path, text in sorted(texts.items()):
        for number, line in enumerate(prose_of(text) if path.endswith(".md") else [], 1):
            for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", re.sub(r"`[^`]*`", "", line)):
                if why := link_problem(texts, files, path, link):
                    problems.append(f"{path}:{number}: link to {link}: {why}")
            if path != "CHANGELOG.md":  # a history names what is gone
                problems += [f"{path}:{number}: names {name}: no such file" for name in NAMED.findall(line) if name not in files]
    if len(texts["README.md"].splitlines()) > MAX_README:
        problems.append(f"README.md: more than {MAX_README} lines")
    versions = {path: (re.findall(pattern, texts[path], re.M) or [""])[0] for path, pattern in VERSIONS.items()}
    if len(set(versions.values())) > 1:
        problems.append(f"versions differ: {versions}")
    return problems


def tree(text, **changed):
    """A small tree that breaks no rule, with `text` as docs/a.md."""
    texts = {"CMakeLists.txt": "project(fp8flow VERSION 1.2.3 LANGUAGES CXX)\n", "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
             "CHANGELOG.md": "# Changes\n\n## 1.2.3 - 2026-01-01\n", "README.md": "# Title\n\n[a](docs/a.md)\n", "docs/a.md": text}
    texts.update({name.replace("_", "."): value for name, value in changed.items()})
    return texts, {"docs", "docs/results", "docs/results/x.json", "scripts/train.sh", *texts}


PLANTED = [
    (tree("[r](../README.md#title), ![p](results/x.json), [w](https://example.org/x#y), [f](results/), `./scripts/train.sh -n 1`\n"), ""),
    (tree("# `a` (b), c-d: E\n[t](#a-b-c-d-e)\n"), ""),
    (tree("```\n[b](b.md)\n```\n`[b](b.md)`\n"), ""),
    (tree("Text.\n[b](b.md)\n"), "docs/a.md:2: link to b.md: no such file"),
    (tree("[r](../README.md) and [b](b.md \"title\")\n"), "b.md: no such file"),
    (tree("[b](../../README.md)\n"), "no such file"),
    (tree("[t](../README.md#titel)\n"), "#titel: no such heading"),
    (tree("[t](#b)\n"), "#b: no such heading"),
    (tree("```\n```\n[b](b.md)\n"), "docs/a.md:3:"),
    (tree("`scripts/tran.sh`\n"), "names scripts/tran.sh"),
    (tree("", README_md="A line.\n" * (MAX_README + 1)), "more than 150 lines"),
    (tree("", CITATION_cff="version: 1.2.2\n"), "versions differ"),
    (tree("", CHANGELOG_md="## 1.3.0\n\n## 1.2.3\n"), "versions differ"),
]


def main():
    problems = []
    for planted, expected in PLANTED:
        found = problems_of(*planted)
        if len(found) != bool(expected) or (expected and expected not in found[0]):
            problems.append(f"planted in {planted[0]['docs/a.md']!r}: found {found}, want '{expected}'")
    texts, files = {}, set()
    for folder, folders, names in os.walk(ROOT):
        if folder == ROOT:
            folders[:] = [name for name in folders if not LEFT_OUT.fullmatch(name)]
        files |= {os.path.relpath(f"{folder}/{name}", ROOT) for name in folders + names}
    for path in files:
        if path.endswith(".md") or path in VERSIONS:
            with open(f"{ROOT}/{path}", encoding="utf-8") as file:
                texts[path] = file.read()
    problems += problems_of(texts, files)
    print("\n".join(problems) or f"{len(texts)} documents, {len(PLANTED)} planted cases")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
