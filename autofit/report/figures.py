"""Plotly's figures of a report, as plain data.

A colour is the name of a CSS variable of the page, such as ``"--best"``; the page's script puts in
its value, so that figures follow the reader's light or dark colours. Plotly reads a part of HTML in
texts: ``escaped`` makes text from a script or a store harmless.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from textwrap import wrap
from typing import Any

from autofit.analysis.verdicts import best_plan
from autofit.report.content import Content, LossCurve, MemoryBar, number_of
from autofit.storage import TrialRecord
from autofit.strategies import Memory
from autofit.text import printable
from autofit.units import format_size
from autofit.view import words
from autofit.view.history import verdict
from autofit.worker.records.trials import Measurement, Verdict

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAxis:
    """An axis of memory from zero that fits the data; sizes are bytes."""

    budget: int
    largest: float
    """The largest size that is drawn."""

    @property
    def far(self) -> bool:
        """Whether the budget is too far above the data to be on the axis."""
        return self.budget > FAR * self.largest > 0

    @property
    def top(self) -> float:
        """The largest size on the axis."""
        return self.largest if self.far else max(self.budget, self.largest)

    @property
    def end(self) -> float:
        """Where the axis ends."""
        return 1.08 * self.top

    @property
    def unit(self) -> tuple[str, int]:
        """The unit of its numbers, and the bytes of one."""
        return words.unit_of(round(self.top))

    def layout(self, title: str) -> Figure:
        """Return Plotly's layout of the axis."""
        name, size = self.unit
        return {"title": f"{title} ({name})", "range": [0, self.end / size]}

    def line(self) -> list[Figure]:
        """Return the line of the budget; none if the budget is too far above the data."""
        at = self.budget / self.unit[1]
        line = {"color": "--bad", "width": 2, "dash": "dash"}
        drawn = {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}
        return [] if self.far else [drawn | {"yref": "y domain"}]

    def label(self, yanchor: str) -> Figure:
        """Return the label of the budget: left of its line, or at the right edge."""
        return {
            "text": f"budget {format_size(self.budget)}{' →' if self.far else ''}",
            "x": (self.end if self.far else self.budget) / self.unit[1],
            "xanchor": "right",
            "xshift": -4,
            "y": 1,
            "yref": "y domain",
            "yanchor": yanchor,
            "showarrow": False,
            "font": {"color": "--bad"},
        }


WIDTH = 46
"""Characters of a line in a hover text."""
MOST = 8
"""Most trials whose step times are drawn."""
FAR = 2.0
"""A budget above so many times the largest size is named at the edge, and not on the axis."""
KINDS = {
    Memory.WEIGHTS: "--weights",
    Memory.GRADIENTS: "--gradients",
    Memory.OPTIMIZER_STATE: "--state",
}
PREDICTED = "/"
"""Hatching of predicted bytes."""


def escaped(text: str) -> str:
    """Return plain text as Plotly shows it: lines of ``WIDTH`` characters, nothing as markup."""
    lines = wrap(printable(text), WIDTH, break_long_words=True) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def figures(content: Content) -> dict[str, Figure]:
    """Return each figure of a report by the identifier of its place in the page.

    A figure without data is left out.
    """
    ended = [trial for trial in content.found.trials if trial.report is not None]
    failed = [trial for trial in ended if trial.verdict is not Verdict.MEASURED]
    found = {"speed": speed(content)} if content.measured else {}
    if failed:
        found["failed"] = without_speed(failed)
    if any(any(bar.static.values()) or bar.measurement for bar in content.memory):
        found["memory"] = memory(content)
    if content.compared:
        found["steps"] = steps(content.compared[:MOST], content)
    if content.losses:
        found["losses"] = losses(content.losses)
    return found


# --- speed against memory ---------------------------------------------------------------------


def speed(content: Content) -> Figure:
    """Return speed against peak memory: trials, the frontier, and the line of the budget."""
    winner = content.found.winner
    others = [t for t in content.measured if not t.plan.neutral and t != winner]
    as_is = [t for t in content.measured if t.plan.neutral and t != winner]
    best = [winner] if winner is not None else []
    sizes = (each for t in content.measured if t.report for each in t.report.measurements)
    largest = max((each.peak_device for each in sizes), default=0)
    axis = MemoryAxis(budget=content.study.budget, largest=largest)
    size = axis.unit[1]
    data = [
        _other_sizes(content, size),
        _frontier(content, size),
        _points("measured", others, size, "--measured", "circle", 10),
        _points("as it is", as_is, size, "--as-is", "diamond", 13),
        _points("best plan", best, size, "--best", "star", 17),
    ]
    layout = {
        "xaxis": axis.layout("peak memory"),
        "yaxis": {"title": "samples per second", "rangemode": "tozero"},
        "shapes": axis.line(),
        "annotations": [axis.label("top")],
    }
    return {"data": [each for each in data if each["x"]], "layout": layout}


def _points(
    name: str, trials: Sequence[TrialRecord], unit: int, colour: str, symbol: str, size: int
) -> Figure:
    measured = [(trial, trial.measurement) for trial in trials if trial.measurement]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [each.peak_device / unit for _, each in measured],
        "y": [each.samples_per_second for _, each in measured],
        "error_y": {
            "type": "data",
            "array": [each.samples_per_second_spread for _, each in measured],
            "color": colour,
            "thickness": 1,
            "width": 3,
        },
        "marker": {"color": colour, "symbol": symbol, "size": size},
        **_hover(_about(trial) for trial, _ in measured),
    }


def _other_sizes(content: Content, unit: int) -> Figure:
    """Return small points for the micro-batch sizes that a trial measured on its way."""
    found = [
        (trial, each)
        for trial in content.measured
        if trial.report is not None
        for each in trial.report.measurements[:-1]
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "other sizes of a trial",
        "x": [each.peak_device / unit for _, each in found],
        "y": [each.samples_per_second for _, each in found],
        "marker": {"color": "--measured", "symbol": "circle-open", "size": 6},
        **_hover(
            f"#{trial.number} {escaped(str(each.plan(trial.plan)))}<br>{_figures(each)}"
            for trial, each in found
        ),
    }


def _frontier(content: Content, unit: int) -> Figure:
    points = content.frontier if content.draws_frontier else ()
    found = sorted(points, key=lambda point: point.measurement.peak_device)
    numbers = [number_of(content.found.trials, point.measurement) for point in found]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "frontier",
        "x": [point.measurement.peak_device / unit for point in found],
        "y": [point.measurement.samples_per_second for point in found],
        "line": {"color": "--frontier", "width": 2, "shape": "hv"},
        **_hover(
            f"frontier, #{number} {escaped(str(point.plan))}<br>{_figures(point.measurement)}"
            for number, point in zip(numbers, found, strict=True)
        ),
    }


def without_speed(failed: Sequence[TrialRecord]) -> Figure:
    """Return the trials without a speed in a row, by verdict: ``x`` is only their order."""
    by_verdict: dict[str, list[int]] = {}
    for place, trial in enumerate(failed):
        by_verdict.setdefault(str(trial.verdict).replace("_", " "), []).append(place)
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": places,
            "y": [0] * len(places),
            "showlegend": True,
            "marker": {
                "color": "--bad" if name == "out of memory" else "--warn",
                "symbol": "x" if name == "out of memory" else "triangle-down",
                "size": 11,
            },
            **_hover(_about(failed[place]) for place in places),
        }
        for name, places in by_verdict.items()
    ]
    layout = {
        "xaxis": {"visible": False, "range": [-0.5, max(12, len(failed)) - 0.5]},
        "yaxis": {"visible": False, "range": [-1, 1]},
    }
    return {"data": data, "layout": layout}


def _about(trial: TrialRecord) -> str:
    text = f"#{trial.number} {escaped(str(best_plan(trial)))}<br>{escaped(verdict(trial))}"
    measured = trial.measurement if trial.verdict is Verdict.MEASURED else None
    return f"{text}<br>{_figures(measured)}" if measured else text


def _figures(measured: Measurement) -> str:
    return f"{words.speed(measured)} samples/s, peak {format_size(measured.peak_device)}"


def _hover(texts: Iterable[str]) -> Figure:
    return {"text": list(texts), "hovertemplate": "%{text}<extra></extra>"}


# --- memory by kind ---------------------------------------------------------------------------


def memory(content: Content) -> Figure:
    """Return the memory by kind, as it is and under the best plan; predictions are hatched."""
    bars = content.memory
    ends = [sum(bar.static.values()) + bar.rest for bar in bars]
    peaks = [bar.measurement.peak_device for bar in bars if bar.measurement]
    axis = MemoryAxis(budget=content.study.budget, largest=max([*ends, *peaks]))
    unit, size = axis.unit
    data = [
        _stack(f"{kind} (predicted)", bars, [bar.static[kind] / size for bar in bars], unit, colour)
        for kind, colour in KINDS.items()
    ]
    data.append(
        _stack(
            "activations and others (the rest)",
            bars,
            [bar.rest / size for bar in bars],
            unit,
            "--activations",
            predicted=False,
        )
    )
    data += _beside_tensors(bars, unit, size)
    data = [each for each in data if any(each["x"])]
    if any(bar.measurement for bar in bars):
        data.append(_peaks(bars, unit, size))
    layout = {
        "barmode": "stack",
        "xaxis": axis.layout("memory"),
        "yaxis": {"autorange": "reversed", "type": "category"},
        "legend": {"y": 1.1},  # above the label of the budget
        "shapes": axis.line(),
        "annotations": [axis.label("bottom")],
    }
    return {"data": data, "layout": layout}


def _row(bar: MemoryBar) -> str:
    """Return the label of a bar."""
    return bar.title if bar.measurement else f"{bar.title}<br>(did not fit:<br>the rest is unknown)"


def _stack(
    name: str,
    bars: Sequence[MemoryBar],
    sizes: Sequence[float],
    unit: str,
    colour: str,
    *,
    predicted: bool = True,
) -> Figure:
    pattern = {"shape": PREDICTED, "fillmode": "replace", "size": 6, "solidity": 0.45}
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [_row(bar) for bar in bars],
        "x": list(sizes),
        "marker": {
            "color": colour,
            "line": {"color": colour, "width": 1},
            **({"pattern": pattern} if predicted else {}),
        },
        "textposition": "none",
        **_hover(f"{name}<br>{each:.3g} {unit}" for each in sizes),
    }


def _beside_tensors(bars: Sequence[MemoryBar], unit: str, size: int) -> list[Figure]:
    """Return what the process holds beside tensors; nothing on the CPU, where only these count."""
    cached = [_difference(b.measurement, "peak_reserved", "peak_allocated") / size for b in bars]
    other = [_difference(b.measurement, "peak_device", "peak_reserved") / size for b in bars]
    named = (
        ("cached by the allocator (measured)", cached, "--cached"),
        ("CUDA and libraries (measured)", other, "--outside"),
    )
    return [
        _stack(name, bars, sizes, unit, colour, predicted=False) for name, sizes, colour in named
    ]


def _difference(measured: Measurement | None, more: str, less: str) -> int:
    if measured is None:
        return 0
    return max(0, int(getattr(measured, more)) - int(getattr(measured, less)))


def _peaks(bars: Sequence[MemoryBar], unit: str, size: int) -> Figure:
    measured = [(_row(bar), bar.measurement.peak_device) for bar in bars if bar.measurement]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "measured peak",
        "x": [peak / size for _, peak in measured],
        "y": [title for title, _ in measured],
        "marker": {"color": "--text", "symbol": "line-ns-open", "size": 26, "line": {"width": 3}},
        **_hover(f"measured peak<br>{peak / size:.4g} {unit}" for _, peak in measured),
    }


# --- step times, losses -----------------------------------------------------------------------


def steps(trials: Sequence[TrialRecord], content: Content) -> Figure:
    """Return the seconds of each measured step, a row a trial, with quartiles."""
    winner = content.found.winner
    data = []
    for trial in trials:
        assert trial.measurement is not None, "a measured trial"
        is_best = winner is not None and trial.id == winner.id
        title = "as it is" if trial.plan.neutral else "best" if is_best else ""
        name = f"#{trial.number}" + (f" {title}" if title else "")
        measured = trial.measurement
        data.append(
            {
                "type": "box",
                "name": name,
                "x": list(measured.step_seconds),
                "y": [name] * len(measured.step_seconds),
                "orientation": "h",
                "boxpoints": "all",
                "jitter": 0.4,
                "pointpos": 0,
                "marker": {"color": "--best" if is_best else "--frontier", "size": 5},
                "line": {"width": 1},
                "fillcolor": "rgba(0,0,0,0)",
                "hoveron": "points",
                "hovertemplate": f"{name}: {escaped(str(best_plan(trial)))}<br>"
                "%{x:.4g} s<extra></extra>",
            }
        )
    layout = {
        "showlegend": False,
        "xaxis": {"title": "seconds of an optimizer step", "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }
    return {"data": data, "layout": layout}


def losses(curves: Sequence[LossCurve]) -> Figure:
    """Return the losses of the reference and of the best plan, step by step.

    Traced steps are full points, measured steps open ones.
    """
    data = []
    styles = (("--as-is", 12, "circle", "solid"), ("--best", 8, "diamond", "dot"))
    for curve, (colour, size, symbol, dash) in zip(curves, styles, strict=False):
        about = escaped(curve.title)
        found = (*curve.traced, *curve.measured)
        values = [each if isfinite(each) else None for each in found]  # JSON has no NaN
        symbols = [symbol] * len(curve.traced) + [f"{symbol}-open"] * len(curve.measured)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": curve.title.partition(":")[0],
                "x": list(range(1, len(values) + 1)),
                "y": values,
                "line": {"color": colour, "width": 2, "dash": dash},
                "marker": {"color": colour, "size": size, "symbol": symbols},
                "hovertemplate": f"{about}<br>step %{{x}}: %{{y:.5g}}<extra></extra>",
            }
        )
    most = max(len(curve.traced) for curve in curves)
    longest = max(len(curve.traced) + len(curve.measured) for curve in curves)
    line = {"color": "--line", "width": 1, "dash": "dot"}
    layout = {
        "xaxis": {"title": "step", "tickformat": "d", **({"dtick": 1} if longest < 9 else {})},
        "yaxis": {"title": "loss"},
        "shapes": [
            {
                "type": "line",
                "x0": most + 0.5,
                "x1": most + 0.5,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": line,
            }
        ],
    }
    return {"data": data, "layout": layout}
