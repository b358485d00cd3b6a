#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the report.html of a profile.json, a plan's JSON or a bench.json.

Usage: show_result.py RESULT.json [OUT.html]     default: report.html
"""
import html
import json
import sys
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent.parent / "model" / "report" / "page" / "page.html"


def page(name, result):
    kind = "bench" if isinstance(result, list) else "profile" if "recipes" in result else "plan"
    machine = {"bench": lambda: result[0]["gpu"], "profile": lambda: result["machine"]["device"],
               "plan": lambda: "predicted for the " + result["prediction"]["gpu"]}[kind]()
    data = {"format": 2, "title": name, "subtitle": machine, kind: result}
    text = json.dumps(data).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    parts = TEMPLATE.read_text().split("{{DATA}}")
    return text.join(part.replace("{{TITLE}}", html.escape(name)) for part in parts)


def main():
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        print("error: want RESULT.json [OUT.html]; see --help", file=sys.stderr)
        return 2
    source = Path(sys.argv[1])
    Path(sys.argv[2] if len(sys.argv) == 3 else "report.html").write_text(page(source.stem, json.loads(source.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
