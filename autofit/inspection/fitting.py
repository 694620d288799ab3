"""``autofit fit``: does a script fit a GPU that is not here, and under which plan?

The script runs for two optimizer steps on a GPU that does not exist (``worker/harness/fake_gpu``).
What a plan would change is computed from the tensors of the second step, as ``autofit explain``
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autofit.exceptions import UsageError
from autofit.facts import Facts
from autofit.inspection.card_fits import CardFit, CardFits, sizes_by_kind
from autofit.inspection.cards import GpuModel, model_named, models_named
from autofit.inspection.explanation import beside_tensors
from autofit.inspection.launches import Target, inspect
from autofit.inspection.options import FitOptions
from autofit.plan import Plan
from autofit.worker.records.inspection import Guess, Inspected, Inspection, TensorKind
from autofit.worker.records.trials import Script

Say = Callable[[str], None]
INSPECTION = Inspection(steps=1)
"""The first step makes the optimizer's state, the second one is followed."""
LIKE = "H100"
"""The card whose rates a card has of which the memory is given alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Which cards a script fits."""

    script: Script
    facts: Facts
    inspected: Inspected
    cards: tuple[CardFit, ...]
    stopped: str
    """What ended the script before its second step, so that the figures are a lower bound and no
    plan is named; else empty."""

    @property
    def by_kind(self) -> dict[TensorKind, int]:
        """Bytes by kind at the peak of the script as it is."""
        return sizes_by_kind((*self.inspected.moments[0].parts, *beside_tensors(self.inspected)))

    @property
    def guesses(self) -> tuple[Guess, ...]:
        """The numbers that were not known, the most frequent first."""
        return self.inspected.guesses

    @property
    def fits(self) -> bool:
        """Whether a plan was found for every card."""
        return all(card.fits for card in self.cards)


def fitting(options: FitOptions, say: Say = lambda line: None) -> Fit:
    """Run a script on a GPU that does not exist, and return which cards it fits.

    Raises:
        UsageError: A card is not known, or the script trains on the CPU.
        ScriptError: The script fails before it holds any tensor on the GPU.
        WorkerError: The process could not be started, or took too long.
    """
    models = _models(options)
    say(f"running {options.script.target} for two steps without a GPU")
    largest = max(models, key=lambda each: (each.capability, each.memory))
    hardware = largest.hardware
    target = Target(
        script=options.script, hardware=hardware, budget=hardware.total_bytes, fake=True
    )
    outcome = inspect(target, Plan(), INSPECTION)
    inspected = outcome.inspected
    if inspected is None or not inspected.moments[0].of(
        TensorKind.WEIGHTS, TensorKind.OTHER, TensorKind.TEMPORARY
    ):
        raise UsageError(
            f"{options.script.target} puts nothing on a GPU: give the arguments with which it"
            " trains on one"
        )
    found = CardFits(outcome, cuda=True)
    return Fit(
        script=options.script,
        facts=outcome.facts,
        inspected=inspected,
        cards=tuple(found.on(model, options.memory) for model in models),
        stopped=outcome.stopped if inspected.timeline is None else "",
    )


def _models(options: FitOptions) -> tuple[GpuModel, ...]:
    """Return the cards of the table, or the one that figures describe."""
    if options.gpu is not None or options.memory is None:
        if options.flops is not None:
            raise UsageError(
                "--flops is for a card that autofit does not know: give its --memory too, no --gpu"
            )
        return models_named(options.gpu)
    like = model_named(LIKE)
    return (like.other(options.memory, half=options.flops or like.half),)
