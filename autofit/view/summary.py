"""The summary at the end of a search and of ``autofit best``: the result and the next commands."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from autofit.analysis.result import Result
from autofit.analysis.verdicts import NOISY, is_faster, margin
from autofit.storage.url import without_password
from autofit.units import exact_size, format_duration
from autofit.view import words
from autofit.worker.records import phases
from autofit.worker.records.trials import Measurement, Script, Verdict

if TYPE_CHECKING:
    from autofit.tuning.preview import Preview


PLAN_FILE = "plan.json"
SAME = {
    "exact": "the same training: equal updates up to the order of floating-point sums",
    "redraw": "the same training with other random draws",
    "rounding": "the same training in lower precision",
    "recipe": "another training recipe",
}
"""The meaning of each fidelity for the training."""
BY_GRADIENTS = "trains in lower precision, and was compared with the script by gradients alone"
"""The same for a plan that rounds, if the script has no losses to compare with."""


def lines(result: Result, *, storage: str | None = None, memory: int | None = None) -> list[str]:
    """Return the lines of the summary; the commands repeat ``storage`` if it is given.

    ``memory``: the budget in bytes for which this plan was chosen, if it is not the study's best.
    """
    speed = words.speed(result.measurement)
    peak = words.of_budget(result.budget, result.measurement.peak_device)
    return [
        f"{speed} samples/s in {peak}: {result.plan}",
        against_baseline(result),
        *notes(result),
        _effort(result),
        *_next(commands(result.script, storage, memory)),
    ]


def against_baseline(result: Result) -> str:
    """Return the sentence that compares a result with the script as it is."""
    same = SAME[result.fidelity]
    if result.plan.neutral and result.trials == 1:
        return "No other plan was measured: nothing to change."
    if result.plan.neutral:
        return "No plan is faster than the script as it is: nothing to change."
    if result.baseline is None:
        plan = BY_GRADIENTS if result.fidelity == "rounding" else f"is {same}"
        return f"As it is, {_as_it_is(result.baseline_verdict)}; the plan {plan}."
    new, old = result.measurement, result.baseline
    factor = new.samples_per_second / old.samples_per_second
    about = f"{factor:.2f} ±{factor * margin(new, old):.2f} times as fast as"
    peak = words.in_unit_of(result.budget, old.peak_device)
    unit = words.unit_of(result.budget)[0]
    return (
        f"{about if is_faster(new, old) else 'About as fast as'} the script as it is "
        f"({words.speed(old)} samples/s in {peak} {unit}){_memory_change(new, old)}; {same}."
    )


def _memory_change(new: Measurement, old: Measurement) -> str:
    """Return how much less or more memory the peak is, from 2 % on."""
    change = round(100 * (new.peak_device / old.peak_device - 1))
    return (
        f", with {abs(change)} % {'less' if change < 0 else 'more'} memory"
        if abs(change) >= 2
        else ""
    )


def notes(result: Result) -> list[str]:
    """Return the lines on the number of devices, on noise and on the parts of the peak."""
    return [*_devices(result), *_noise(result), *_memory(result)]


def _devices(result: Result) -> list[str]:
    """Return the line on the number of devices, if plans on several numbers were measured."""
    if result.elsewhere is None:
        return []
    (plan, other), new = result.elsewhere, result.measurement
    used, more = result.devices, max(result.ranks, plan.ranks)
    name = "GPU" if not result.hardware.on_host else "process"
    against = f"the fastest plan on {words.many(more, name)}"
    if used < more:
        fewer = words.many(used, name)
        return [f"It uses {fewer}: {against} reaches {words.speed(other)} samples/s ({plan})."]
    factor = new.samples_per_second / other.samples_per_second
    gain = f"{factor:.2f} ±{factor * margin(new, other):.2f} times as fast as"
    return [
        f"It uses {words.many(used, name)}, which is {gain} {against}"
        f" ({words.speed(other)} samples/s: {plan})."
    ]


def _noise(result: Result) -> list[str]:
    """Return the line for a machine whose step times vary much; none for another."""
    if result.variation < NOISY:
        return []
    return [
        f"The step times vary by {100 * result.variation:.0f} %: another process may be using this "
        "machine. Differences smaller than that mean nothing."
    ]


def _memory(result: Result) -> list[str]:
    """Return the line with the parts of the peak; none on the CPU, where only tensors count."""
    measured, unit = result.measurement, words.unit_of(result.budget)[0]
    tensors, cached, outside = (
        words.in_unit_of(result.budget, size)
        for size in (
            measured.peak_allocated,
            measured.peak_reserved - measured.peak_allocated,
            measured.peak_device - measured.peak_reserved,
        )
    )
    if result.hardware.on_host:
        return []
    return [
        f"At the peak: tensors {tensors}, cached by torch's allocator {cached}, "
        f"outside it (CUDA, libraries) {outside} {unit}."
    ]


def _as_it_is(verdict: Verdict) -> str:
    if verdict is Verdict.OUT_OF_MEMORY:
        return "the script does not fit"
    return f"the script was not measured ({verdict.value.replace('_', ' ')})"


def _effort(result: Result) -> str:
    trials, launches = words.many(result.trials, "trial"), words.many(result.launches, "launch")
    return (
        f"{trials} in {launches}, memory ran out in {result.launches_out_of_memory} of these, "
        f"{format_duration(result.search_seconds)}{_seconds(result)}; study {result.study}."
    )


PHASES = {
    "start": (phases.START,),
    "import": (phases.IMPORT,),
    "first batch": (phases.FIRST_BATCH,),
    "check": (phases.CHECK,),
    "steps": (phases.OBSERVE, phases.PROBE, phases.CONFIRM),
    "compile": (phases.COMPILE,),
    "waiting for data": (phases.DATA,),
    "Ray": (phases.RAY,),
    "waiting for the search": (phases.IDLE,),
    "other": (phases.OTHER,),
}
"""The words of the summary for the phases."""


def _seconds(result: Result) -> str:
    """Return where the time went, if it is known; at least 1 s for each phase."""
    known = dict(result.seconds_by_phase)
    summed = {word: sum(known.get(each, 0.0) for each in PHASES[word]) for word in PHASES}
    parts = [f"{word} {seconds:.0f} s" for word, seconds in summed.items() if seconds >= 1]
    return f" ({', '.join(parts)})" if parts else ""


def commands(
    script: Script, storage: str | None = None, memory: int | None = None
) -> list[tuple[str, str]]:
    """Return the commands that use a result, and what each does; arguments as for ``lines``."""
    options = [] if storage is None else ["--storage", without_password(storage)]
    if memory is None:
        found = [
            (_command(script, "run", *options), "train with this plan"),
            (_command(script, "best", *options, "--format", "json"), "export this plan"),
        ]
    else:  # `autofit run` takes the study's best plan, unless it is given another
        limit, plan = ["--memory", exact_size(memory)], ["--plan", PLAN_FILE]
        found = [
            (_command(script, "best", *options, *limit, "-o", PLAN_FILE), "export this plan"),
            (_command(script, "run", *options, *plan, *limit), "train with it"),
        ]
        options += limit
    by_hand = _command(script, "best", *options, "--format", "python")
    return [*found, (by_hand, "show it as PyTorch code")]


def _next(found: list[tuple[str, str]]) -> list[str]:
    wide = max(len(command) for command, _ in found)
    return [f"   {command:<{wide}}   {purpose}" for command, purpose in found]


def _command(script: Script, name: str, *options: str) -> str:
    if script.launcher:
        line = (*script.launcher, script.target, *script.args)
        return shlex.join(("autofit", name, *options, "--", *line))
    target = ("-m", script.target) if script.module else (script.target,)
    args = ("--", *script.args) if script.args else ()
    return shlex.join(("autofit", name, *target, *options, *args))


def preview_lines(preview: Preview) -> list[str]:
    """Return the preview as plain text."""
    return [
        *([preview.note] if preview.note else []),
        *(f"{number:>3}  {plan}" for number, plan in enumerate(preview.plans)),
        *words.left_out(preview.left_out),
        _estimate(preview.minutes),
    ]


def preview_document(preview: Preview) -> dict[str, Any]:
    """Return the preview for ``--json``; ``minutes`` is ``[least, most]`` or ``null``."""
    return {
        "plans": [plan.levels for plan in preview.plans],
        "left_out": [
            {"strategy": strategy, "level": level, "reason": reason}
            for strategy, level, reason in preview.left_out
        ],
        "note": preview.note,
        "minutes": None if preview.minutes is None else list(preview.minutes),
    }


def _estimate(minutes: tuple[float, float] | None) -> str:
    if minutes is None:
        return "no estimate of the time: autofit has not run this script yet"
    least, most = minutes
    if most < 1:
        return "less than a device minute"
    return f"about {least:.0f} to {most:.0f} device minutes"
