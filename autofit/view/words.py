"""Figures and facts as text: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autofit.analysis.verdicts import is_faster
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.strategies import AS_IS, AUTO, Fidelity, Number, counting, get
from autofit.tuning.notices import StudyStarted
from autofit.units import format_duration, format_size
from autofit.worker.records.trials import Measurement, OutOfMemory, Script, TrialReport, Verdict

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_COUNTS = ((1e9, "B", 2), (1e6, "M", 1), (1e3, "K", 0))
_FAILED = {
    Verdict.REFUSED: "refused",
    Verdict.PLAN_FAILED: "failed",
    Verdict.SCRIPT_FAILED: "the script failed",
    Verdict.TIMED_OUT: "timed out",
    Verdict.INTERRUPTED: "interrupted",
    Verdict.DRIFTED: "drifted",
}


def unit_of(budget: int) -> tuple[str, int]:
    """Return the unit of a budget and its bytes; peaks beside the budget use the same unit."""
    return next((unit for unit in _UNITS if budget >= unit[1]), _UNITS[-1])


def in_unit_of(budget: int, size: int) -> str:
    """Return ``size`` bytes as a bare number in the budget's unit: ``"23.1"``, ``"0.012"``."""
    number = size / unit_of(budget)[1]
    if number >= 0.995 or size == 0:
        return f"{number:.1f}"
    return f"{number:.{2 if number >= 0.095 else 3}f}" if number >= 0.0005 else "<0.001"


def of_budget(budget: int, size: int) -> str:
    """Return ``"23.1 of 24.0 GiB"``.

    >>> of_budget(24 << 30, 23 << 30)
    '23.0 of 24.0 GiB'
    """
    return f"{in_unit_of(budget, size)} of {in_unit_of(budget, budget)} {unit_of(budget)[0]}"


def rate(samples_per_second: float) -> str:
    """Return samples per second with about three digits, without an exponent."""
    digits = 0 if samples_per_second >= 99.95 else 1 if samples_per_second >= 9.995 else 3
    return f"{samples_per_second:.{digits}f}"


def speed(measurement: Measurement) -> str:
    """Return the speed and how far it may be off: ``"18.0 ±0.3"``, in samples per second."""
    found = rate(measurement.samples_per_second)
    digits = len(found.partition(".")[2])
    return f"{found} ±{measurement.samples_per_second_spread:.{digits}f}"


def against(new: Measurement, old: Measurement) -> str:
    """Return the change of speed: ``"+13 %"``, or ``"~+2 %"`` within what the spreads explain."""
    about = "" if is_faster(new, old) or is_faster(old, new) else "~"
    return about + change(new.samples_per_second / old.samples_per_second)


def change(factor: float) -> str:
    """Return a factor as a signed percentage: ``"+13 %"``."""
    return f"{round((factor - 1) * 100):+d} %"  # never -0


def count(number: int) -> str:
    """Return a number of parameters: ``"1.10 B"``."""
    for size, letter, digits in _COUNTS:
        if number >= size:
            return f"{number / size:.{digits}f} {letter}"
    return str(number)


def many(number: int, noun: str) -> str:
    """Return ``"1 launch"``, ``"6 launches"``."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number} {noun}{ending}"


def device_line(started: StudyStarted) -> str:
    """Return the line on the device, the budget, the allowed fidelities, and the study."""
    hardware = started.hardware
    budget = f"{format_size(started.budget)} {'as requested' if started.asked else 'free'}"
    study = f"{many(started.resumed, 'trial')} stored" if started.resumed else "new"
    return (
        f"{started.devices} x {hardware.name}, {format_size(hardware.total_bytes)},"
        f" budget {budget}; "
        f"allowed: {allowed(started.allow)}; study {started.study} ({study})"
    )


def allowed(allow: str) -> str:
    """Return every fidelity up to ``allow``: ``"exact, redraw, rounding"``."""
    return ", ".join(str(each) for each in Fidelity if each <= Fidelity[allow.upper()])


def script_line(script: Script, facts: Facts) -> str:
    """Return the line on the models, optimizers and batch of the script, as far as known."""
    parts = [
        *(_root(root, times) for root, times in Counter(facts.roots).items()),
        *dict.fromkeys(facts.optimizers),
        *([samples] if (samples := _samples(facts)) else []),
    ]
    return f"{script.target}: {', '.join(parts) or 'nothing known yet'}"


def _samples(facts: Facts) -> str:
    """Return what a sample is in the rates; empty while that is not known."""
    samples = facts.effective_batch
    if samples is None:
        return "batch size unknown: a step counts as one sample" if facts.stepped else ""
    # Before the first step, more calls may follow the one in which memory ran out.
    known = facts.stepped or facts.calls_per_step > 1
    doubted = any(root.batch_doubted for root in facts.roots[:1])
    sure = "if the first dimension is the batch" if doubted else "(from the script)"
    return f"{many(samples, 'sample')} a {'step' if known else 'call'} {sure}"


def _root(root: RootFacts, times: int) -> str:
    named = f"Hugging Face model {root.name}" if root.transformers else root.name
    blocks = f", {many(root.blocks, 'block')}" if root.blocks else ""
    many_times = f"{times} x " if times > 1 else ""
    return f"{many_times}{named}, {count(root.parameters)} parameters{blocks}"


def without_open_numbers(plan: Plan) -> str:
    """Return a plan without the numbers that its trial has yet to find."""
    found = plan.splits and plan.chunk is None
    known = plan.with_number(Number.SAMPLES, AS_IS) if found else plan
    return str(known).replace(f" {AUTO}", "")


def left_out(reasons: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each reason, with the levels that it excludes."""
    by_reason: dict[str, list[str]] = {}
    for strategy, level, reason in reasons:
        by_reason.setdefault(reason, []).append(get(strategy).describe(level))
    return [f"not tried: {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def verdict(report: TrialReport, *, best: bool = False) -> str:
    """Return the verdict of a trial in a few words; the ``best`` so far has an arrow."""
    short = report.out_of_memory
    if report.verdict is Verdict.MEASURED:
        notes = _too_large(short, report.plan) if short else ""
        if report.measurement and report.measurement.compile_seconds >= 0.5:
            notes += f" (compile {format_duration(report.measurement.compile_seconds)})"
        notes += f" ({report.reason})" if report.reason else ""
        return f"fits{'  <- best' * best}{notes}"
    if report.verdict is Verdict.OUT_OF_MEMORY:
        return shortage(short) if short else "out of memory"
    blamed = f" ({report.blamed})" if report.blamed else ""
    reason = f": {report.reason.splitlines()[0]}" if report.reason else ""
    return f"{_FAILED[report.verdict]}{blamed}{reason}"


def _too_large(short: OutOfMemory, plan: Plan) -> str:
    """Return a note on the numbers at which a measured plan ran out of memory."""
    level = short.checkpointing if plan.blocks == AUTO else None
    blocks = f" with {counting(Number.BLOCKS).describe(level)}" if level else ""
    blocks = " without checkpointing" if level == AS_IS else blocks
    return f" ({short.micro_batch} at a time{blocks} did not fit)" if short.micro_batch else ""


def shortage(short: OutOfMemory) -> str:
    """Return where memory ran out: ``"out of memory in backward (2.0 GiB requested)"``."""
    requested = f" ({format_size(short.requested)} requested)" if short.requested else ""
    return f"{short.where}{requested}"
