"""``autofit explain``: what holds the memory of a script, and what each technique would free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autofit import strategies
from autofit.exceptions import StorageError, UsageError
from autofit.facts import Facts, Hardware
from autofit.inspection import techniques
from autofit.inspection.card_fits import CardFit, CardFits, sizes_by_kind
from autofit.inspection.cards import MODELS
from autofit.inspection.launches import Outcome, Target, inspect, leaner_plans, whole
from autofit.inspection.options import ExplainOptions
from autofit.inspection.techniques import Technique
from autofit.plan import Plan
from autofit.storage import Store
from autofit.strategies import AUTO, Number
from autofit.worker.records.inspection import (
    Growth,
    Inspected,
    Inspection,
    Kind,
    Moment,
    Part,
)
from autofit.worker.records.trials import OutOfMemory, Script

STEPS = 8
"""Followed steps with ``leak``: five of them show growth, see ``leaks.growths``."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What holds the memory of a script at its peak, and what would lower it."""

    script: Script
    hardware: Hardware
    budget: int
    """Bytes that the process may occupy on the device."""
    facts: Facts
    plan: Plan
    """The plan under which the memory was followed: neutral if the script fits as it is."""
    inspected: Inspected
    out_of_memory: OutOfMemory | None
    """Where memory ran out, if the script does not fit as it is."""
    failed: Moment | None
    """What held the memory then."""
    techniques: tuple[Technique, ...]
    """Those that free memory, the most first; empty if the script does not fit."""
    cards: tuple[CardFit, ...]
    """How the script fits common GPUs; empty if it does not fit here."""
    follows_leaks: bool
    """Whether enough steps were followed to see growth."""

    @property
    def peak(self) -> Moment:
        """The moment at which tensors held most."""
        return self.inspected.moments[0]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that the process occupied at the peak, cache and CUDA context included."""
        return (*self.peak.parts, *beside_tensors(self.inspected))

    @property
    def by_kind(self) -> dict[Kind, int]:
        """Bytes by kind, in the order of ``Kind``; the sum is what the process occupied."""
        return sizes_by_kind(self.parts)

    @property
    def unsplittable(self) -> str | None:
        """Why the batch cannot be split; ``None`` if it can."""
        return strategies.counting(Number.SAMPLES).inapplicable(AUTO, self.facts)

    @property
    def growths(self) -> tuple[Growth, ...]:
        """Leaks, the largest first; empty unless ``leak`` was given."""
        return self.inspected.growths if self.follows_leaks else ()


def explain(options: ExplainOptions, say: Say = lambda line: None) -> Explanation:
    """Run a script for a few steps, and return what held its memory.

    Raises:
        UsageError: An option is not possible here.
        ScriptError: The script fails for another reason than memory, or does not train.
        WorkerError: The process could not be started, or took too long.
    """
    target = Target.on(options.script, gpu=options.gpu, memory=options.memory)
    if options.snapshot is not None:
        _check_snapshot(target.hardware, Path(options.snapshot))
    inspection = Inspection(
        steps=STEPS if options.leak else Inspection().steps, snapshot=options.snapshot is not None
    )
    say(f"following the memory of {options.script.target} for {inspection.steps + 1} steps")
    outcome = as_it_is = whole(inspect(target, Plan(), inspection), options.script)
    if outcome.uncontained:
        say("this system allows no overlay: files that the script writes stay")
    failed = None
    if not as_it_is.fits:
        failed = as_it_is.inspected.moments[0] if as_it_is.inspected else None
        outcome = _leaner(target, as_it_is, inspection, say)
    assert outcome.inspected is not None, "it fits, or held memory when it failed"
    if options.snapshot is not None and outcome.inspected.snapshot is not None:
        Path(options.snapshot).write_bytes(outcome.inspected.snapshot)
    found: tuple[Technique, ...] = ()
    fitting: tuple[CardFit, ...] = ()
    timeline = outcome.inspected.timeline
    if as_it_is.fits and timeline is not None:
        measured = _measured(options, target)
        found = techniques.techniques(timeline, outcome.facts, target.hardware, measured)
        fits = CardFits(outcome, cuda=not target.hardware.on_host)
        fitting = tuple(fits.on(model) for model in MODELS)
    return Explanation(
        script=options.script,
        hardware=target.hardware,
        budget=target.budget,
        facts=outcome.facts,
        plan=outcome.plan,
        inspected=outcome.inspected,
        out_of_memory=as_it_is.out_of_memory,
        failed=failed,
        techniques=found,
        cards=fitting,
        follows_leaks=options.leak,
    )


def beside_tensors(inspected: Inspected) -> tuple[Part, ...]:
    """Return what the process held beside tensors: the allocator's cache and the CUDA context."""
    plain = inspected.plain
    if plain is None:
        return ()
    sizes = {
        Kind.CACHE: plain.reserved - plain.allocated,
        Kind.CONTEXT: plain.device - plain.reserved,
    }
    return tuple(Part(kind=kind, size=size) for kind, size in sizes.items() if size > 0)


def _check_snapshot(hardware: Hardware, path: Path) -> None:
    if hardware.on_host:
        raise UsageError(
            f"--snapshot {path}: PyTorch records memory snapshots of GPUs only; this machine has"
            " none, so leave it out"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--snapshot {path}: there is no folder {path.parent}; make it first")


def _leaner(target: Target, whole: Outcome, inspection: Inspection, say: Say) -> Outcome:
    """Return the outcome under the first leaner plan that fits, or what held the memory."""
    for plan in leaner_plans(whole.facts, target.hardware):
        say(f"out of memory; following the script under a plan that needs less: {plan}")
        found = inspect(target, plan, inspection)
        if found.fits:
            return found
    if whole.inspected is None:
        raise UsageError(
            f"{target.script.target} runs out of memory before its model is called, under each plan"
            " that was tried: give more --memory, or run `autofit search`"
        )
    return whole


def _measured(options: ExplainOptions, target: Target) -> techniques.Measured:
    """Return what searches have measured; nothing where there is no store."""
    with suppress(StorageError), Store(options.storage, create=False) as store:
        return techniques.stored(store, options.script, target.hardware)
    return {}
