"""What each level of the catalogue is worth: alone, and in its usual company, on several works.

    python benchmarks/strategies.py [--work vit ...] [--strategy NAME ...] [--alone no]
    python benchmarks/strategies.py --page      # writes results/strategies.md from the results

Every row is a trial as a search runs it: full optimizer steps, synchronised, the first ones
dropped, the median. Levels that can be taken back are measured one after another in one process,
beside the plan they are compared with; the others come first in a process of their own. The
difference of the gradients is that of the plan's proof, on a few samples of the script's own batch;
that of the loss is over the first steps, where a plan came first in its process. Writes
``strategies.json`` after each row, and keeps what it holds of other rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grid import EXAMPLES, HERE, RESULTS, WORKS, Work, command_line, merged, stored

from autofit import strategies
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import AUTO, Level, Strategy
from autofit.units import format_size
from autofit.worker import meter
from autofit.worker.cluster.versions import versions
from autofit.worker.launch.launcher import launch
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import LaunchRequest, Script, Traced, TrialReport, Verdict

UNET = Work("unet", "../tests/gpu/unet.py", ("--steps", "4000"), ())
ALL = (*WORKS, UNET)
"""The examples, and a network of convolutions, which they are not."""
PAGE = RESULTS / "strategies.md"
STEPS = 6
"""Measured of each plan."""
LAUNCH_SECONDS = 400.0
COMPANY = {"precision": "bf16", "optimizer": "fused"}
"""What people use first; a level takes the place of what it cannot stand beside."""
TOO_LARGE = frozenset({"decoder"})
"""Works that do not fit a card as they are: nothing is measured alone."""
NUMBERS = {"micro_batch": "4", "checkpointing": "8"}
"""A number in the place of a level that asks for one."""
OWN = {
    ("vit", "gradient_release"): ("--no-clip",),
    ("decoder", "gradient_release"): ("--no-clip",),
    ("bert", "padding"): ("--shortest", "64", "--pad-to-longest"),
}
"""Arguments of a work without which a technique has nothing to do there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One level on one work; sizes in bytes."""

    work: str
    strategy: str
    level: str
    company: str
    """The rest of the plan, as people say it; empty where the level stands alone."""
    verdict: str
    reason: str = ""
    samples_per_second: float | None = None
    ratio: float | None = None
    """Time for a sample against the same plan without the level."""
    peak_device: int | None = None
    peak_reserved: int | None = None
    saved: int | None = None
    """Device bytes less than without the level."""
    gradient_difference: float | None = None
    loss_difference: float | None = None
    """Relative, over the first steps."""
    compile_seconds: float = 0.0
    command: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """A level to be measured, and the plan without it."""

    strategy: str
    level: str
    plan: Plan
    base: Plan

    @property
    def company(self) -> str:
        """The base, as people say it."""
        return "" if self.base.neutral else str(self.base)


def trials(work: Work, names: Sequence[str], *, alone: bool) -> Iterator[Trial]:
    """Yield every level: in company first, then alone."""
    companies = [COMPANY, *([{}] if alone and work.name not in TOO_LARGE else [])]
    for company in companies:
        for strategy in strategies.REGISTRY:
            for level in strategy.levels[1:]:
                if not names or strategy.name in names:
                    yield _beside(strategy, number_of(strategy, level), company)


def number_of(strategy: Strategy, level: Level) -> str:
    """Return the level to measure: a number in the place of ``auto``."""
    return NUMBERS[strategy.name] if level.name == AUTO else level.name


def _beside(strategy: Strategy, level: str, company: dict[str, str]) -> Trial:
    """Return a level beside as much of the company as it stands."""
    others = {name: each for name, each in company.items() if name != strategy.name}
    plan = Plan.of({**others, strategy.name: level})
    for name in list(others):
        if clash(plan):
            plan = plan.replace(**{name: strategies.AS_IS})
    return Trial(strategy.name, level, plan, plan.replace(**{strategy.name: strategies.AS_IS}))


class Benchmark:
    """The rows of one work on one device."""

    def __init__(self, work: Work, folder: Path) -> None:
        self._work = work
        self._path = folder / "strategies.json"
        self._device = meter.default_device()
        self._hardware = meter.hardware(self._device)
        self._budget = meter.free_bytes(self._device)
        self._bases: dict[Plan, TrialReport] = {}
        self._losses: dict[Plan, list[float]] = {}

    def run(self, found: Sequence[Trial]) -> None:
        """Measure every trial, launch by launch, and keep the rows as they come."""
        apart = [trial for trial in found if not trial.plan.fixed.neutral]
        shared = [trial for trial in found if trial.plan.fixed.neutral]
        bases = [*dict.fromkeys(trial.base for trial in shared)]
        self._launch([*dict.fromkeys([*bases, *(trial.plan for trial in shared)])], found)
        for base in dict.fromkeys(trial.base for trial in apart):
            if base not in self._losses:
                self._launch([base], found)
            for trial in apart:
                if trial.base == base:
                    self._launch([trial.plan], found)

    def _launch(self, plans: Sequence[Plan], found: Sequence[Trial]) -> None:
        known: dict[Plan, list[Trial]] = {}
        for trial in found:
            known.setdefault(trial.plan, []).append(trial)
        runnable = []
        for plan in plans:
            reason = self._unavailable(plan)
            if plan in known and reason:
                report = TrialReport(index=0, plan=plan, verdict=Verdict.REFUSED, reason=reason)
                self._keep(known[plan], report)
            else:
                runnable.append(plan)
        request = LaunchRequest(
            script=Script(
                target=str(EXAMPLES / self._work.script),
                args=self._work.arguments,
                cwd=str(HERE.parent),
            ),
            plans=tuple(runnable),
            device=self._device,
            budget=self._budget,
            timeout=LAUNCH_SECONDS,
            steps=STEPS,
        )
        for event in launch(request) if runnable else ():
            if isinstance(event, Traced):
                self._losses[runnable[event.index]] = _losses(event.trace)
            elif isinstance(event, TrialReport):
                self._bases[event.plan] = event
                self._keep(known.get(event.plan, []), event)

    def _unavailable(self, plan: Plan) -> str | None:
        reasons = (s.unavailable(level, self._hardware) for s, level in plan)
        return next((reason for reason in reasons if reason), None) or clash(plan)

    def _keep(self, trials: Sequence[Trial], report: TrialReport) -> None:
        new = [self._row(trial, report) for trial in trials]
        sys.stderr.write("".join(line(row) + "\n" for row in new))
        before = stored(self._path, "rows")
        rows = merged(before, map(asdict, new), "work", "strategy", "level", "company")
        document = {"hardware": self._hardware.name, "versions": dict(versions()), "rows": rows}
        self._path.write_text(json.dumps(document, indent=1) + "\n")

    def _row(self, trial: Trial, report: TrialReport) -> Row:
        measured, base = report.measurement, self._bases.get(trial.base)
        without = base.measurement if base else None
        ours, theirs = self._losses.get(trial.plan), self._losses.get(trial.base)
        known: dict[str, Any] = {
            "work": self._work.name,
            "strategy": trial.strategy,
            "level": trial.level,
            "company": trial.company,
            "verdict": str(report.verdict),
            "reason": report.reason,
            "command": command_line(),
        }
        if measured is None:
            return Row(**known)
        return Row(
            **known,
            samples_per_second=measured.samples_per_second,
            ratio=(without.samples_per_second / measured.samples_per_second if without else None),
            peak_device=measured.peak_device,
            peak_reserved=measured.peak_reserved,
            saved=without.peak_device - measured.peak_device if without else None,
            gradient_difference=report.gradient_difference,
            loss_difference=_apart(ours, theirs) if ours and theirs else None,
            compile_seconds=measured.compile_seconds,
        )


def _losses(trace: Trace) -> list[float]:
    return [sum(step.losses) for step in trace.steps]


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of two losses, as a share of the larger of the second."""
    scale = max(abs(loss) for loss in theirs) or 1.0
    return max(abs(mine - other) for mine, other in zip(ours, theirs, strict=False)) / scale


# --- the page -----------------------------------------------------------------------------------


INTRODUCTION = """\
*Time* is that for a sample against the same plan without the level (below 1 is faster; half a
sample's tokens are half a sample); *saved* is the device memory it frees, at the same batch.
*Gradients* is the relative difference from the plain model's on a few samples, *loss* that of the
first steps where the plan came first in its process. What frees memory may let the batch run in
larger parts, which is faster: that is what a search finds out.
"""


def page(document: dict[str, Any]) -> str:
    """Return ``results/strategies.md``: what the strategies say, and what was measured."""
    rows = [Row(**row) for row in document["rows"]]
    where = "{hardware}, torch {torch}, Python {python}".format(
        hardware=document["hardware"], **document["versions"]
    )
    told = [
        "# Strategies, measured",
        "",
        f"Written by `python benchmarks/strategies.py --page`; measured on one {where}.",
        "",
        *(f"- `{work.name}`: `{work.script} {' '.join(work.arguments)}`" for work in ALL),
        *(f"- `{work}` for `{name}`: `{' '.join(own)}` too" for (work, name), own in OWN.items()),
        "",
        INTRODUCTION.rstrip(),
    ]
    for strategy in strategies.REGISTRY:
        told += ["", f"## {strategy.name}", "", _about(strategy), ""]
        told += table([row for row in rows if row.strategy == strategy.name])
    return "\n".join(told) + "\n"


def _about(strategy: Strategy) -> str:
    lowers = ", ".join(sorted(str(kind) for kind in strategy.lowers)) or "no memory by itself"
    summary = strategy.summary[0].upper() + strategy.summary[1:]
    levels = [f"- `{each.name}` [{each.fidelity}]: {each.summary}" for each in strategy.levels[1:]]
    return "\n".join([f"{summary}. Lowers {lowers}. Source: <{strategy.source}>", "", *levels])


HEAD = (
    "level",
    "work",
    "beside",
    "samples/s",
    "time",
    "device",
    "reserved",
    "saved",
    "gradients",
    "loss",
    "compile",
)


def table(rows: Iterable[Row]) -> list[str]:
    """Return rows as a table in Markdown."""
    return [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *map(line, rows)]


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    cells = [f"`{row.level}`", row.work, row.company or "nothing"]
    if row.samples_per_second is None:
        cells += [f"{row.verdict.replace('_', ' ')}: {row.reason}", *[""] * (len(HEAD) - 4)]
    else:
        cells += [
            f"{row.samples_per_second:.4g}",
            _shown(row.ratio, ".3f"),
            format_size(row.peak_device or 0),
            format_size(row.peak_reserved or 0),
            f"{(row.saved or 0) / 2**30:.2f} GiB" if row.saved is not None else "",
            _shown(row.gradient_difference, ".1e"),
            _shown(row.loss_difference, ".1e"),
            f"{row.compile_seconds:.0f} s" if row.compile_seconds >= 0.5 else "",
        ]
    return f"| {' | '.join(cells)} |"


def _shown(figure: float | None, form: str) -> str:
    return "" if figure is None else format(figure, form)


def main() -> None:
    """Measure what was asked for, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", action="append", choices=[work.name for work in ALL])
    parser.add_argument("--strategy", action="append", choices=strategies.NAMES)
    parser.add_argument("--alone", choices=("yes", "no"), default="yes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page, measure nothing")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(json.loads((arguments.out / "strategies.json").read_text())))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for work in ALL:
        if not arguments.work or work.name in arguments.work:
            alone = arguments.alone == "yes"
            found: dict[tuple[str, ...], list[Trial]] = {}
            for trial in trials(work, arguments.strategy or (), alone=alone):
                found.setdefault(OWN.get((work.name, trial.strategy), ()), []).append(trial)
            for own, some in found.items():
                script = replace(work, arguments=(*work.arguments, *own))
                Benchmark(script, arguments.out).run(some)


if __name__ == "__main__":
    main()
