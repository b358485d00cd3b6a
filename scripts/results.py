#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Results of measurements: checks those that are kept in docs/results, and makes them small, a page, or screenshots.

  scripts/results.py check                                               docs/results says where its files come from, and stays small
  scripts/results.py compact runs/a/profile.json docs/results/profile_a.json [--keep stages|arms|times]
  scripts/results.py page RESULT.json [OUT.html]                         the report.html of a profile.json, a plan's JSON or a bench.json
  scripts/results.py screenshots FOLDER [OUT]                            its pictures (*.svg) and reports (*.html)

check: every file is cited by a page. The commits that files name are in the history, and one from which a page checks runs out has them.
A .json is an object, a list of objects, or an object with `runs`, a list of objects that inherit what they lack. Each has
  commit   seven hexadecimal digits or more
  command  the command line
  date     begins with YYYY-MM-DD
  machine  `gpu` (a name), or `machine` (a text, or an object as commands write it, or with `device`)
A .txt names a commit and a date. A result without a control arm has no noise floor: null, never 0. Exit status 1 if a file breaks a rule.

compact: no values by step, numbers to seven digits, one line per row. --keep arms leaves out the rows by stage; --keep times leaves out
everything of an arm but the times of layer and step, which is what `calibrate.py --check` compares. Medians, spread, conditions, commit and command
stay, and so does the form: whatever reads profile.json, bench.json or validate.json reads the compact file.

screenshots: reports as wide as a phone (390 pixels) and a desktop (1280), in light and dark colours, into OUT (default: FOLDER/screenshots).
Needs Chromium; exit status 77 where there is none.
"""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jobs

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


# ---- check
MOST_FILES, MOST_BYTES = 70, 1_500_000
COMMIT = re.compile(r"[0-9a-f]{7,40}$")
DATE = re.compile(r"20\d\d-[01]\d-[0-3]\d")


def machine_of(item):
    machine = item.get("gpu") or item.get("machine")
    if isinstance(machine, dict):  # as commands write it
        machine = machine.get("gpu") or machine.get("device") or machine.get("cpu")
    return machine


def problems_of_item(item):
    values = {"commit": item.get("commit"), "command": item.get("command"), "date": item.get("date"), "machine": machine_of(item)}
    forms = {"commit": COMMIT, "date": DATE}
    return [f"no {name}" for name, value in values.items()
            if not (isinstance(value, str) and value.strip() and (name not in forms or forms[name].match(value)))]


def items_of(data):
    if isinstance(data, list):
        return data
    if "runs" in data:
        return [{**{key: value for key, value in data.items() if key != "runs"}, **run} for run in data["runs"]]
    return [data]


def problems_of_json(path):
    try:
        items = items_of(json.loads(path.read_text()))
    except ValueError as error:
        return [f"not JSON: {error}"]
    problems = [] if items else ["empty"]
    for i, item in enumerate(items):
        where = f"entry {i}: " if len(items) > 1 else ""
        problems += [where + problem for problem in problems_of_item(item)]
        if item.get("noise floor") is not None and not any(arm.get("verdict") == "noise floor" for arm in item.get("arms", [])):
            problems.append(where + "a noise floor without a control arm")
    return problems


def problems_of(path):
    if path.suffix == ".json":
        return problems_of_json(path)
    if path.suffix != ".txt":
        return ["neither .json nor .txt"]
    text, patterns = path.read_text(), {"commit": r"\bcommits?:? [0-9a-f]{7}\b", "date": DATE}
    return [f"no {name}" for name, pattern in patterns.items() if not re.search(pattern, text)]


def history():
    """The commits up to HEAD; None in a copy that does not have all of them."""
    return jobs.git("rev-list", "HEAD").split() if jobs.git("rev-parse", "--is-shallow-repository") == "false" else None


def problems_of_history(files, pages, commits):
    named = {(path.name, commit) for path in files for commit in re.findall(r'"commit": ?"([0-9a-f]{7,})"', path.read_text())}
    problems = [f"/{name}: commit {commit} is not in the history" for name, commit in sorted(named)
                if not any(one.startswith(commit) for one in commits)]
    for commit, folder in set(re.findall(r"git checkout ([0-9a-f]+) -- (docs/results/\w+)", pages)):
        if "/run.json" not in jobs.git("ls-tree", "-r", "--name-only", commit, folder):
            problems.append(f"/{pathlib.Path(folder).name}: commit {commit} has no runs of it")
    return problems


def check(_):
    files = [path for path in sorted(RESULTS.iterdir()) if path.name != "README.md"]
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if page.parent != RESULTS)  # it lists all
    problems = [f"/{path.name}: {problem}" for path in files for problem in problems_of(path)[:5]]
    problems += [f"/{path.name}: no page cites it" for path in files if path.name not in pages]
    commits = history()
    if commits is not None:
        problems += problems_of_history(files, pages, commits)
    size = sum(path.stat().st_size for path in files)
    if len(files) > MOST_FILES or size > MOST_BYTES:
        problems.append(f": {len(files)} files of {size} bytes, want at most {MOST_FILES} and {MOST_BYTES}; scripts/results.py compact")
    for problem in problems:
        print(f"docs/results{problem}", file=sys.stderr)
    print(f"{len(files)} files in docs/results, {len(problems)} problem{'s' if len(problems) != 1 else ''}")
    return 1 if problems else 0


# ---- compact
TIMES = ["name", "recipe", "layer seconds", "layer clock hertz", "step seconds"]
DROPPED = ["share", "bytes per second", "flops per second", "ceiling share", "flops", "casts", "memory in use"]  # of a stage row


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items() if not key.endswith("by step")}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        short = float(f"{value:.7g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    return value


def compacted(result, keep):
    """The text of a compact profile.json or bench.json."""
    profile = rounded(result)
    line = lambda value: json.dumps(value, separators=(",", ":"))
    if isinstance(profile, list):  # of bench: null, and 0 FLOPs or bytes, say nothing; `gpu` names the machine
        rows = [{key: value for key, value in row.items() if value is not None and (value != 0 or value is False)
                 and not (key == "machine" and row.get("gpu"))} for row in profile]
        return "[\n " + ",\n ".join(map(line, rows)) + "]\n"
    arms = []
    for arm in profile.pop("recipes"):
        rows = arm.pop("rows")
        rows = [{key: value for key, value in row.items() if key not in DROPPED} for row in rows] if keep == "stages" else []
        if keep == "times":
            arm = {key: arm[key] for key in TIMES if key in arm}
        arms.append(line(arm)[:-1] + ',"rows":[' + ",\n  ".join(map(line, rows)) + "]}")
    return line(profile)[:-1] + ',\n"recipes":[\n ' + ",\n ".join(arms) + "]}\n"


def compact(options):
    result = json.loads(options.source.read_text())
    if "arms" in result:  # of validate
        jobs.write_json(options.result, rounded(result))
    else:
        options.result.write_text(compacted(result, options.keep))


# ---- page
def page(options):
    name, result = options.result.stem, json.loads(options.result.read_text())
    kind = "bench" if isinstance(result, list) else "profile" if "recipes" in result else "plan"
    if kind == "plan" and "prediction" not in result:
        sys.exit(f"{options.result}: got neither a profile.json with `recipes`, a plan's JSON nor a bench.json")
    machine = {"bench": lambda: result[0]["gpu"], "profile": lambda: result["machine"]["device"],
               "plan": lambda: "predicted for the " + result["prediction"]["gpu"]}[kind]()
    data = {"format": 2, "title": name, "subtitle": machine, kind: result}
    text = json.dumps(data).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    parts = (ROOT / "model" / "report" / "page" / "page.html").read_text().split("{{DATA}}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text.join(parts))


# ---- screenshots
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin:0">
<iframe src="file://{}" style="border:0;width:{}px;height:{}px"></iframe>
"""


def screenshots(options):
    if not options.folder.is_dir():
        print(f"error: {options.folder} is not a folder", file=sys.stderr)
        return 2
    out = (options.out or options.folder / "screenshots").resolve()
    out.mkdir(parents=True, exist_ok=True)
    browser = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
    if browser is None:
        print("error: no Chromium here", file=sys.stderr)
        return 77
    with tempfile.TemporaryDirectory() as work:
        def shoot(file, width, height, words):
            """A frame has the size that is asked for; a window may be wider, and its page is lower than itself."""
            picture, frame = out / ".".join([file.stem, *words, "png"]), pathlib.Path(work, "frame.html")
            frame.write_text(FRAME.format(file.resolve(), width, height))
            done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files",
                                   f"--user-data-dir={work}/profile", f"--blink-settings=preferredColorScheme={int(words[-1] == 'light')}",
                                   "--virtual-time-budget=4000", f"--window-size={max(500, width)},{height + 160}", f"--screenshot={picture}",
                                   f"file://{frame}"], capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"{done.stderr}error: {browser} took no picture of {file}")
            print(picture)

        wanted = [(file, width, options.height or height, [str(width)]) for file in sorted(options.folder.glob("*.html"))
                  for width, height in ((390, 5200), (1280, 3600))]
        for file in sorted(options.folder.glob("*.svg")):
            wanted.append((file, *(int(re.search(rf' {side}="(\d+)"', file.read_text())[1]) for side in ("width", "height")), []))
        for *what, words in wanted:
            for scheme in ("light", "dark"):
                shoot(*what, [*words, scheme])
    return 0


def main():
    parser = jobs.command_line(__doc__)
    _, of_compact, of_page, of_screenshots = jobs.commands(parser, check, compact, page, screenshots)
    of_compact.add_argument("source", type=pathlib.Path)
    of_compact.add_argument("result", type=pathlib.Path)
    of_compact.add_argument("--keep", choices=["stages", "arms", "times"], default="stages")
    of_page.add_argument("result", type=pathlib.Path)
    of_page.add_argument("out", type=pathlib.Path, nargs="?", default="report.html", help="default: report.html")
    of_screenshots.add_argument("folder", type=pathlib.Path)
    of_screenshots.add_argument("out", type=pathlib.Path, nargs="?", help="default: FOLDER/screenshots")
    of_screenshots.add_argument("--height", type=int, help="of reports, in pixels")
    options = parser.parse_args()
    return options.action(options)


if __name__ == "__main__":
    sys.exit(main())
