"""The table of what a search takes for the model of each script: ``roots.md``.

    python -m tests.scripts._roots > tests/scripts/roots.md
    python -m tests.scripts._roots FOLDER_OR_SCRIPT ...

Each script runs as it is for the first steps of a search. ``test_roots.py`` compares the rows with
the file. Compare a row with its script before you commit it: the root is the outermost module that
the script calls and whose parameters an optimizer steps.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from autofit.facts import Facts
from autofit.plan import Plan
from autofit.tuning.messages import too_short
from autofit.worker.launch.launcher import Control, launch
from autofit.worker.records.trials import (
    Answer,
    Asking,
    LaunchEnded,
    LaunchRequest,
    Learned,
    Script,
    TrialReport,
)

HERE = Path(__file__).resolve().parent
TABLE = HERE / "roots.md"
BUDGET, TIMEOUT = 4 << 30, 120.0
ARGUMENTS = ("--out", "model.pt")
"""What the scripts of this folder are given."""
ENVIRONMENT = (
    ("CUDA_VISIBLE_DEVICES", ""),
    ("HF_HUB_OFFLINE", "1"),
    ("OMP_NUM_THREADS", "1"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
)
RANKS = {"ddp.py": 2}
NO_ROW = ("model.py",)
"""Modules of this folder that are no script."""
HEADER = "script", "roots", "blocks", "samples a call", "calls a step", "verdict"


@dataclass(frozen=True)
class Row:
    """What a search takes for the model of one script; several roots are joined by ``+``."""

    script: str
    roots: str
    blocks: str
    samples: str
    calls: str
    verdict: str
    """That of the script as it is, with its reason; or why the search has none."""

    def __str__(self) -> str:
        return f"| {' | '.join(astuple(self))} |"


@dataclass(frozen=True)
class Wrong:
    """A row that a search gets wrong today."""

    right: Row
    reason: str
    """What is wrong, and why."""


KNOWN_WRONG = {
    wrong.right.script: wrong
    for wrong in (
        Wrong(
            Row("pictures", "Detector", "3", "16", "1", "measured"),
            "the channels of the first picture are taken for samples: 3",
        ),
        Wrong(
            Row("rate_finder", "Net", "4", "16", "1", "measured"),
            "the copy is observed, which is never called again: 8 samples",
        ),
        Wrong(
            Row("tokenizer", "Net", "4", "16", "1", "measured"),
            "the frozen tokenizer stays the first root: Tokenizer + Net",
        ),
    )
}
"""The rows in ``roots.md`` that a search does not find."""


def scripts(given: Sequence[str] = ()) -> list[Path]:
    """Return the scripts and packages among ``given`` and in its folders; default: all here."""
    return [path for each in given or [str(HERE)] for path in _scripts_of(Path(each).resolve())]


def _scripts_of(path: Path) -> list[Path]:
    if not path.is_dir() or (path / "__main__.py").exists():
        return [path]
    ours = ("_", "test_", "conftest")
    found = [each for each in sorted(path.iterdir()) if not each.name.startswith(ours)]
    return [
        each
        for each in found
        if each.name not in NO_ROW and (each.suffix == ".py" or (each / "__main__.py").exists())
    ]


def row_of(script: Path, folder: Path, arguments: Sequence[str] = ARGUMENTS) -> Row:
    """Run the first steps of a search for ``script`` in ``folder``; return what it found."""
    package = script.is_dir()
    if package:
        shutil.copytree(script, folder / script.name)
    request = LaunchRequest(
        script=Script(
            target=script.name if package else str(script),
            module=package,
            args=tuple(arguments),
            cwd=str(folder),
            environment=ENVIRONMENT,
        ),
        plans=(Plan(),),
        device="cpu",
        budget=BUDGET,
        timeout=TIMEOUT,
        converses=True,
        ranks=RANKS.get(script.name, 1),
    )
    control, facts, report, end = Control(), Facts(), None, None
    for event in launch(request, control=control):
        match event:
            case Asking():
                control.answer(Answer(plans=(), timeout=TIMEOUT))
            case Learned():
                facts = event.facts
            case TrialReport():
                report = event
            case LaunchEnded():
                end = event
    return Row(
        script=script.name.removesuffix(".py"),
        roots=_joined(root.name for root in facts.roots),
        blocks=_joined(str(root.blocks) for root in facts.roots),
        samples=_joined(
            "unknown" if root.batch is None else f"{root.batch}{'?' * root.batch_doubted}"
            for root in facts.roots
        ),
        calls=str(facts.calls_per_step) if facts.roots else "-",
        verdict=_verdict(replace(request.script, target=script.name), report, end),
    )


def _joined(values: Iterator[str]) -> str:
    return " + ".join(values) or "-"


def _verdict(script: Script, report: TrialReport | None, end: LaunchEnded | None) -> str:
    if report is not None:
        return f"{report.verdict}: {report.reason}" if report.reason else str(report.verdict)
    assert end is not None, "a launch ends with LaunchEnded"
    return too_short(script, end.steps, seen=False)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|", *map(str, rows)]
    return "\n".join(lines) + "\n"


def written() -> dict[str, Row]:
    """Return the rows of ``roots.md`` by script."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    rows = [Row(*line.removeprefix("| ").removesuffix(" |").split(" | ")) for line in lines]
    return {row.script: row for row in rows}


def main() -> None:
    """Print the table of the scripts in ``sys.argv``.

    For this folder, a row that is known to be wrong is printed as it should be.
    """
    rows = []
    arguments = () if sys.argv[1:] else ARGUMENTS
    for script in scripts(sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            row = row_of(script, Path(folder), arguments)
        sys.stderr.write(f"{row}\n")
        wrong = None if sys.argv[1:] else KNOWN_WRONG.get(row.script)
        rows.append(row if wrong is None else wrong.right)
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
