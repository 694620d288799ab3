"""The live table in a terminal: finished rows scroll up; running trials are shown below them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autofit.plan import Plan
from autofit.text import printable
from autofit.tuning.notices import (
    Notice,
    PhaseBegun,
    SizeMeasured,
    StudyStarted,
    TrialDropped,
    TrialEnded,
    TrialStarted,
)
from autofit.units import format_duration
from autofit.view import words
from autofit.view.transcript import Transcript
from autofit.worker.records.trials import Measurement

STYLES = {"head": "bold", "best": "green", "bad": "yellow", "dim": "dim", "": ""}
"""Rich's styles for the values of ``StyledLine.style``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One trial in progress."""

    plan: Plan
    """The plan; numbers that the trial has to find are open."""
    since: float
    """The start, in seconds of ``time.monotonic``."""
    latest: Measurement | None = None
    on: str = ""
    """The card that the trial runs on; empty if there is only one."""
    phase: str = "starts"
    """What its process does now."""
    steps: int = 0
    """Optimizer steps measured so far."""


class LiveTable:
    """Shows a search on a terminal, with rich."""

    def __init__(
        self, stream: TextIO, console: Console | None = None, *, verbose: bool = False
    ) -> None:
        self._console = console or Console(file=stream, highlight=False, soft_wrap=False)
        self._transcript = Transcript(verbose=verbose)
        self._durations: list[float] = []
        """Seconds of the trials that have ended, by which the time left is estimated."""
        self._running: dict[int, Running] = {}
        self._budget = 1
        self._live = Live(
            console=self._console, get_renderable=self.status, transient=True, auto_refresh=True
        )

    def __call__(self, notice: Notice) -> None:
        """Print the lines of ``notice`` above the running trials, and update these."""
        self._follow(notice)
        for line in self._transcript.lines(notice, self._console.width):
            self._console.print(Text(line.text, style=STYLES[line.style]))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._running.clear()
        self._live.stop()

    def status(self) -> Text:
        """Return a line for each running trial."""
        now = time.monotonic()
        running = list(self._running.values())  # a copy: this runs in rich's refresh thread
        usual = median(self._durations) if self._durations else None
        found = [running_line(each, now, self._budget, usual) for each in running]
        return Text("\n".join(found), style="cyan", no_wrap=True, overflow="ellipsis")

    def _follow(self, notice: Notice) -> None:
        match notice:
            case StudyStarted(budget=budget):
                self._budget = budget
            case TrialStarted(slot=slot, plan=plan, on=on):
                running = self._running.get(slot)
                if running is None or running.plan != plan:  # else it was told in advance
                    self._running[slot] = Running(plan=plan, since=time.monotonic(), on=on)
            case PhaseBegun(slot=slot, phase=phase, steps=steps) if slot in self._running:
                running = self._running[slot]
                steps += running.steps
                self._running[slot] = replace(running, phase=phase, steps=steps)
            case SizeMeasured(slot=slot, plan=plan, measurement=latest):
                running = self._running.get(slot) or Running(plan=plan, since=time.monotonic())
                self._running[slot] = replace(running, phase="measures", latest=latest)
            case TrialEnded(slot=slot) | TrialDropped(slot=slot):
                ended = self._running.pop(slot, None)
                if ended is not None:
                    self._durations.append(time.monotonic() - ended.since)
            case _:
                pass


def running_line(running: Running, now: float, budget: int, usual: float | None = None) -> str:
    """Return the line of a running trial at the time ``now``.

    ``usual``: seconds that a trial usually takes, by which the time left is estimated.
    """
    on = f"{printable(running.on)}: " if running.on else ""
    step = f", step {running.steps}" if running.steps else ""
    seconds = now - running.since
    plan, duration = words.without_open_numbers(running.plan), format_duration(seconds)
    line = f"  .. {on}{plan}: {running.phase}{step}, {duration}"
    if usual is not None and usual > seconds:
        line += f", about {format_duration(usual - seconds)} left"
    if running.latest is None:
        return line
    latest = running.latest
    return (
        f"{line}: {words.rate(latest.samples_per_second)} samples/s at micro "
        f"{latest.micro_batch}, {words.of_budget(budget, latest.peak_device)}"
    )
