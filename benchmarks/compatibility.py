"""Run launches and searches over real scripts, unmodified, and write ``results/compatibility.md``.

    python benchmarks/public_data.py FOLDER
    python benchmarks/compatibility.py --public FOLDER [--only NAME ...] [--skip-search] [--render]

Each script of ``compatibility.toml`` runs in a throw-away copy of its folder: first one launch with
the script as it is, every level that the device has by itself, and a split batch, then, where the
list says so, ``autofit search`` with 70 % of the memory that the script needs as it is. What the
launches report is kept in ``results/compatibility.json``; the page has no other source, and
``--render`` writes it again without running anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autofit import strategies
from autofit.plan import Plan
from autofit.strategies import AS_IS, Hardware
from autofit.worker import meter
from autofit.worker.cluster.versions import versions
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Learned,
    Script,
    TrialReport,
)

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
LIST = HERE / "compatibility.toml"
RESULTS = HERE / "results" / "compatibility.json"
PAGE = HERE / "results" / "compatibility.md"

BUDGET = 8 << 30
"""Bytes each launch of the first table may use: more than any of the scripts needs."""
SHARE = 0.7
"""Of what a script needs as it is: the budget of its search."""
LAUNCH_SECONDS = 240.0
SEARCH_SECONDS = 600.0
ALIKE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}
"""For every run: no downloads; one thread, because idle OpenMP threads wait by spinning; data made
for an older torch may be loaded."""
LEFT_OUT = ("*.pyc", "__pycache__", ".git", "autofit.db*")
"""Not copied, and not counted among what a script leaves behind."""
EXIT_CODES = {0: "found", 1: "script failed", 2: "usage", 3: "nothing fits"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One script of the list."""

    name: str
    source: str
    folder: Path
    command: tuple[str, ...]
    note: str = ""
    search: bool = False

    @property
    def parts(self) -> tuple[list[str], list[str]]:
        """What to run, a path or ``-m`` and a module, and the script's own arguments."""
        border = 2 if self.command[0] == "-m" else 1
        return [*self.command[:border]], [*self.command[border:]]

    @property
    def variables(self) -> dict[str, str]:
        """The environment it runs in."""
        return {**os.environ, **ALIKE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one plan on one script; figures in bytes and seconds."""

    plan: str
    """``"as it is"``, or ``strategy level``."""
    verdict: str
    reason: str = ""
    micro_batch: int | None = None
    peak: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the launches over one script reported."""

    root: str = ""
    """Classes of the roots, batch, framework: the facts as learned."""
    outcomes: tuple[Outcome, ...] = ()
    launches: int = 0
    seconds: float = 0.0
    steps: int = 0
    """Optimizer steps taken in the last launch."""
    stopped: bool = False
    """The last launch was stopped by the harness after its last plan."""
    left: tuple[str, ...] = ()
    """Files and folders it created in its working directory."""
    output: str = ""
    """The last line it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What ``autofit search`` made of one script."""

    budget: int
    neutral: int
    """Bytes it needs as it is."""
    code: int
    seconds: float
    best: dict[str, Any] | None
    """The document that ``--json`` wrote."""
    limit: str = ""
    """What ``--timeout`` was given."""
    last_line: str = ""


def main() -> None:
    """Run what was asked for and write the page."""
    arguments = _arguments()
    entries = _entries(arguments.public.resolve())
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.render:
        device = meter.default_device()
        hardware = meter.hardware(device)
        results["ran_on"] = {**asdict(hardware), "cores": os.cpu_count(), "versions": versions()}
        for entry in entries:
            if arguments.only and entry.name not in arguments.only:
                continue
            if not arguments.skip_launch:
                results.setdefault("rows", {})[entry.name] = asdict(examine(entry, hardware))
            if entry.search and not arguments.skip_search:
                found = search(entry, results["rows"][entry.name], arguments.timeout)
                results.setdefault("searches", {})[entry.name] = found and asdict(found)
            RESULTS.write_text(json.dumps(results, indent=1, default=list) + "\n")
    PAGE.write_text(page(entries, results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write results/compatibility.md from real runs.")
    parser.add_argument("--public", type=Path, default=Path("public"), help="folder of checkouts")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these scripts alone")
    parser.add_argument("--skip-launch", action="store_true", help="keep the first table's rows")
    parser.add_argument("--skip-search", action="store_true", help="keep the second table's rows")
    parser.add_argument("--timeout", metavar="DUR", help="of each search, as for autofit search")
    parser.add_argument("--render", action="store_true", help="run nothing, write the page again")
    return parser.parse_args()


def _entries(public: Path) -> list[Entry]:
    text = LIST.read_text().replace("{public}", str(public)).replace("{repo}", str(REPO))
    return [
        Entry(
            **{
                **each,
                "folder": Path(each["folder"]),
                "command": tuple(each["command"]),
            }
        )
        for each in tomllib.loads(text)["script"]
    ]


# --- launches ---------------------------------------------------------------------------------


def plans_for(hardware: Hardware, batch: int | None = None) -> list[Plan]:
    """Return the neutral plan, then each level that ``hardware`` has, alone.

    With the ``batch`` known, also a quarter of it at a time: where the size that is fastest is the
    whole batch, that one says whether a split is possible at all.
    """
    alone = [
        Plan.of({strategy.name: level.name})
        for strategy in strategies.REGISTRY
        for level in strategy.levels[1:]
        if strategy.unavailable(level.name, hardware) is None
    ]
    forced = [Plan.of({"micro_batch": str(-(-batch // 4))})] if batch and batch > 1 else []
    return [Plan(), *alone, *forced]


def examine(entry: Entry, hardware: Hardware) -> Row:
    """Launch until every plan has a report; a launch that dies is followed by one without it."""
    plans, outcomes, row = plans_for(hardware), dict[Plan, Outcome](), Row()
    forced = False
    while missing := [plan for plan in plans if plan not in outcomes]:
        asked = tuple(dict.fromkeys([Plan(), *missing]))
        with scratch_copy(entry.folder) as folder:
            before = _files(folder)
            events = list(_launch(entry, folder, asked, hardware.device))
            left = sorted(_files(folder) - before)
        reports = [event for event in events if isinstance(event, TrialReport)]
        known = len(outcomes)
        for report in reports:
            if report.plan not in outcomes:
                outcomes[report.plan] = _outcome(report)
        row = _row(row, events, left)
        _say(entry, reports)
        if not forced and (batch := _batch(events)) is not None:
            forced, plans = True, plans_for(hardware, batch)
        if len(outcomes) == known or Plan() not in outcomes:
            break
        if outcomes[Plan()].verdict != "measured":
            break
    return Row(**{**_shallow(row), "outcomes": tuple(outcomes.values())})


def _batch(events: Sequence[LaunchEvent]) -> int | None:
    """Return the samples in one call of the model, as the launch learned them."""
    facts = [event.facts for event in events if isinstance(event, Learned)]
    return facts[-1].batch if facts else None


def _launch(
    entry: Entry, folder: Path, plans: tuple[Plan, ...], device: str
) -> Iterator[LaunchEvent]:
    target, arguments = entry.parts
    module = len(target) == 2
    script = Script(target=target[-1], module=module, args=tuple(arguments), cwd=str(folder))
    request = LaunchRequest(
        script=script, plans=plans, device=device, budget=BUDGET, timeout=LAUNCH_SECONDS
    )
    return launch(request, environment=entry.variables)


def _outcome(report: TrialReport) -> Outcome:
    measurement = report.measurement
    return Outcome(
        plan=str(report.plan),
        verdict=str(report.verdict),
        reason=report.reason,
        micro_batch=measurement.micro_batch if measurement else None,
        peak=measurement.peak_device if measurement else None,
        seconds=measurement.seconds if measurement else None,
    )


def _row(before: Row, events: Sequence[LaunchEvent], left: Sequence[str]) -> Row:
    facts = [event.facts for event in events if isinstance(event, Learned)]
    ended = next(event for event in events if isinstance(event, LaunchEnded))
    root = before.root
    if facts:
        names = " + ".join(each.name for each in facts[-1].roots)
        batch = facts[-1].effective_batch
        calls = facts[-1].calls_per_step
        split = f" in {calls} calls" if calls > 1 else ""
        root = f"{names}, {batch} a step{split}, {facts[-1].framework}"
    return Row(
        root=root,
        launches=before.launches + 1,
        seconds=before.seconds + ended.seconds,
        steps=ended.steps,
        stopped=ended.stopped,
        left=tuple(sorted({*before.left, *left})),
        output=(ended.output.strip().splitlines() or [""])[-1],
    )


def _shallow(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def _say(entry: Entry, reports: Sequence[TrialReport]) -> None:
    for report in reports:
        outcome = _outcome(report)
        _tell(f"{entry.name}: {outcome.plan}: {_cell(asdict(outcome), None)}\n{report.traceback}")


def _tell(text: str) -> None:
    sys.stderr.write(text.rstrip() + "\n")


# --- searches ---------------------------------------------------------------------------------


def search(entry: Entry, row: dict[str, Any], limit: str | None) -> Searched | None:
    """Run ``autofit search`` with less memory than the script needs; ``None`` without a peak."""
    neutral = next((each["peak"] for each in row["outcomes"] if each["plan"] == "as it is"), None)
    if neutral is None:
        return None
    budget = int(neutral * SHARE)
    target, arguments = entry.parts
    command = [sys.executable, "-m", "autofit", "search", *target, "--json"]
    command += ["--memory", f"{budget}B", *(["--timeout", limit] if limit else [])]
    command += ["--", *arguments]
    started = time.monotonic()
    with scratch_copy(entry.folder) as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            env=entry.variables,
            capture_output=True,
            text=True,
            timeout=SEARCH_SECONDS,
            check=False,
        )
    _tell(done.stderr)
    return Searched(
        budget=budget,
        neutral=neutral,
        code=done.returncode,
        seconds=time.monotonic() - started,
        best=_without_paths(json.loads(done.stdout)) if done.returncode == 0 else None,
        limit=limit or "",
        last_line=(done.stderr.strip().splitlines() or [""])[-1],
    )


def _without_paths(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "script"}


@contextmanager
def scratch_copy(folder: Path) -> Iterator[Path]:
    """Yield a copy of ``folder`` in a temporary one, beside links to its neighbours."""
    with tempfile.TemporaryDirectory(prefix="compatibility-") as temporary:
        copy = Path(temporary) / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        for neighbour in folder.parent.iterdir():
            if neighbour.name != folder.name:
                (copy.parent / neighbour.name).symlink_to(neighbour)
        yield copy


def _files(folder: Path) -> set[str]:
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    found = set()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ignore(parent, folders)]
        kept = [name for name in names if name not in ignore(parent, names)]
        found |= {str((Path(parent) / name).relative_to(folder)) for name in [*folders, *kept]}
    return found


# --- the page ---------------------------------------------------------------------------------


def page(entries: Sequence[Entry], results: dict[str, Any]) -> str:
    """Return the text of the page."""
    rows, searches = results.get("rows", {}), results.get("searches", {})
    known = [entry for entry in entries if entry.name in rows]
    searched = [entry for entry in known if entry.search and entry.name in searches]
    parts = [
        "# Scripts that autofit was run on, unmodified",
        "Written by `benchmarks/compatibility.py` from what its launches and searches reported;"
        " not edited by hand.",
        _ran_on(results["ran_on"]),
        "## Script by strategy",
        "One launch a script: as it is, then each level of each strategy alone. A cell with figures"
        " was *applied* (proven on the script's own batch, then measured): peak memory, seconds of"
        " an optimizer step, and both against the script as it is. The machine is small and was"
        " shared: read the times as rough. `micro auto` looks for the fastest"
        " size that fits, with memory to spare here: it may be the whole batch in one piece."
        " A quarter of the batch at a time is forced, to see whether a split is possible.",
        _strategy_table(known, rows),
        "Where they come from, and how they were called:",
        _sources(known, rows),
        "## Searches",
        f"`autofit search SCRIPT --memory SIZE`, with {SHARE:.0%} of what the script needs as it"
        " is, so that the untouched script fails.",
        _search_table(searched, searches),
    ]
    return "\n\n".join(parts) + "\n"


def _ran_on(machine: dict[str, Any]) -> str:
    figures = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = f"{machine['name']} ({machine['device']}, {machine['cores']} cores)"
    return f"Ran on: {where}; {figures}. On a CPU memory is what torch's allocator holds."


def _strategy_table(entries: Sequence[Entry], rows: dict[str, Any]) -> str:
    found = (_column(o["plan"]) for e in entries for o in rows[e.name]["outcomes"])
    plans = list(dict.fromkeys(found))
    lines = [["script", *plans]]
    for entry in entries:
        outcomes = {_column(each["plan"]): each for each in rows[entry.name]["outcomes"]}
        neutral = outcomes.get("as it is")
        ended = f"nothing to measure: it ended after {rows[entry.name]['steps']} optimizer steps"
        cells = [_cell(outcomes[plan], neutral) if plan in outcomes else "" for plan in plans]
        if not outcomes:
            cells[0] = _escaped(ended)
        lines.append([entry.name, *cells])
    return _markdown(lines)


def _column(plan: str) -> str:
    size = plan.removeprefix("micro ")
    return "a quarter of the batch" if size.isdigit() else plan


def _cell(outcome: dict[str, Any], neutral: dict[str, Any] | None) -> str:
    if outcome["peak"] is None or outcome["verdict"] != "measured":
        return _escaped(f"{outcome['verdict'].replace('_', ' ')}: {outcome['reason']}")
    figures = f"{_mebibytes(outcome['peak'])}, {outcome['seconds']:.3f} s"
    if neutral is None or outcome is neutral or neutral["peak"] is None:
        return figures
    size = f"micro {outcome['micro_batch']}, " if outcome["plan"].startswith("micro") else ""
    peak = outcome["peak"] / neutral["peak"]
    seconds = outcome["seconds"] / neutral["seconds"]
    return f"{size}{figures} ({peak:.2f} of the memory, {seconds:.2f} of the time)"


def _sources(entries: Sequence[Entry], rows: dict[str, Any]) -> str:
    lines = [["script", "from", "arguments", "what was seen", "data and changes", "left behind"]]
    for entry in entries:
        row = rows[entry.name]
        arguments = " ".join(each.rpartition("/")[2] for each in entry.parts[1])
        left = ", ".join(f"`{name}`" for name in row["left"]) or "nothing"
        lines.append([entry.name, entry.source, f"`{arguments}`", row["root"], entry.note, left])
    return _markdown(lines)


def _search_table(entries: Sequence[Entry], searches: dict[str, Any]) -> str:
    head = ["script", "budget", "exit code", "best plan", "peak", "s a step", "trials"]
    lines = [[*head, "launches (out of memory)", "seconds"]]
    for entry in entries:
        if (found := searches[entry.name]) is None:
            continue
        code = f"{found['code']} ({EXIT_CODES.get(found['code'], 'other')})"
        budget = f"{_mebibytes(found['budget'])} of {_mebibytes(found['neutral'])}"
        best = found["best"]
        if best is None:
            figures = [_escaped(found["last_line"]), "", "", "", ""]
        else:
            figures = [
                _plan(best),
                _mebibytes(best["peak_bytes"]),
                f"{best['step_seconds']:.3f}",
                str(best["trials"]),
                f"{best['launches']} ({best['launches_out_of_memory']})",
            ]
        limit = f" (with --timeout {found['limit']})" if found.get("limit") else ""
        lines.append([entry.name, budget, code, *figures, f"{found['seconds']:.0f}{limit}"])
    return _markdown(lines)


def _plan(best: dict[str, Any]) -> str:
    levels = {name: level for name, level in best["plan"].items() if level != AS_IS}
    return f"{Plan.of(levels)} ({best['fidelity']})"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    table = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(each) + " |" for each in table)


if __name__ == "__main__":
    main()
