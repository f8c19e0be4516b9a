"""Results: rows, parts, one file of JSON, and one table in Markdown.

A row is {name, status, numbers, why}. Status is one of
- held: the promise holds, or the value was taken and has no target;
- missed: measured, and off its target;
- absent: this machine lacks what the row needs, and `why` names it;
- failed: a program failed, or the part did not end in its time.
"""

import json
import os
import pathlib

from harness.machine import Absent, Failed

STATUSES = ["absent", "held", "missed", "failed"]


def row(name, status, why="", **numbers):
    return {"name": name, "status": status, "why": why, "numbers": numbers}


def with_target(name, value, good, target, why="", **numbers):
    """A row with a target; `why` explains a miss."""
    return row(name, "held" if good else "missed", why, value=value, target=target, **numbers)


def taken(name, value, **numbers):
    """A row without a target."""
    return row(name, "held", value=value, **numbers)


def guarded(name, rows):
    """Rows; the last one says what failed, or what the machine lacks for them."""
    try:
        yield from rows
    except Absent as why:
        yield row(name, "absent", str(why))
    except Failed as why:
        yield row(name, "failed", str(why))


def worst(rows):
    """A part's status, which is that of its worst row."""
    return max((one["status"] for one in rows), key=STATUSES.index, default="failed")


class Results:
    """The results of a machine, written after each row, so that an interrupted run has results."""

    def __init__(self, folder, facts, date):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(facts["gpu"].replace("NVIDIA ", "").split()).lower()
        self.stem = f"{date}-{name}-{facts['driver']}"
        self.content = {"machine": facts, "date": date, "parts": []}
        if self.json.exists():
            # Parts of an earlier run on the same machine and day are kept until they are run again.
            self.content["parts"] = json.loads(self.json.read_text(encoding="utf8"))["parts"]

    @property
    def json(self):
        return self.folder / f"{self.stem}.json"

    @property
    def markdown(self):
        return self.folder / f"{self.stem}.md"

    def put(self, part):
        parts = [one for one in self.content["parts"] if one["name"] != part["name"]]
        self.content["parts"] = [*parts, part]
        self.write()

    def write(self):
        for path, text in ((self.json, json.dumps(self.content)), (self.markdown, table(self.content))):
            new = path.with_name(f".{path.name}.new")
            new.write_text(f"{text}\n", encoding="utf8")
            os.replace(new, path)


def joined(files, folder):
    """Writes the parts of several files of one machine and day as one result. If several files have a part, the last
    one counts."""
    contents = [json.loads(pathlib.Path(path).read_text(encoding="utf8")) for path in files]
    first = contents[0]
    for path, content in zip(files, contents):
        same = [content["date"], content["machine"]["gpu"], content["machine"]["driver"]]
        if same != [first["date"], first["machine"]["gpu"], first["machine"]["driver"]]:
            raise SystemExit(f"--join {path}: of another machine or day than {files[0]}: {', '.join(same)}")
    results = Results(folder, first["machine"], first["date"])
    for content in contents:
        for part in content["parts"]:
            if part["rows"]:
                results.put(part)
    return results.content


def table(content):
    """All rows in one table, with the GPU and the driver above it."""
    facts = content["machine"]
    lines = [
        f"{facts['gpu']}, {facts['memory'] >> 20} MiB, driver {facts['driver']}, {content['date']}; "
        f"a share of {facts['share'] >> 20} MiB",
        "",
    ]
    if facts["simulated"]:
        lines += ["The GPU is simulated: its times and sizes are the simulator's.", ""]
    lines += ["| part | what | bare | measured | target | status |", "|---|---|---|---|---|---|"]
    for part in content["parts"]:
        for one in part["rows"] or [row("", part["status"], part.get("why", ""))]:
            numbers = one["numbers"]
            cells = [part["name"], one["name"], text(numbers.get("bare")), text(numbers.get("value"))]
            cells += [text(numbers.get("target")), f"{one['status']}{': ' if one['why'] else ''}{one['why']}"]
            lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def text(value):
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
