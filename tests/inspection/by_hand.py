"""An explanation and a check in which every part is present, made without a launch."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from autofit.facts import Facts, Hardware, RootFacts
from autofit.inspection.card_fits import CardFit, FittingPlan
from autofit.inspection.check import Check, Grown
from autofit.inspection.explanation import Explanation
from autofit.inspection.fitting import Fit
from autofit.inspection.techniques import Basis, Technique
from autofit.plan import Plan
from autofit.strategies import Fidelity
from autofit.worker.records.inspection import (
    Growth,
    Guess,
    Inspected,
    Part,
    PeakMoment,
    PlainSteps,
    SourceLine,
    TensorKind,
)
from autofit.worker.records.trials import OutOfMemory, Script

MIB = 1 << 20
GIB = 1 << 30
EVIL = "train\x1b[2J.py"
"""A name that would clear a terminal."""
SCRIPT = Script(target=EVIL, cwd="/project")
PLACE = SourceLine(line=f"{EVIL}:7", source="loss = model(x)")
BELOW = SourceLine(line="lib/net.py:3", source="return act(x)")
H200 = Hardware(device="cuda", name="NVIDIA H200", total_bytes=140 * GIB)


def explanation() -> Explanation:
    """Return an explanation with a leak, a technique of each basis, and two cards."""
    parts = (
        Part(kind=TensorKind.WEIGHTS, size=40 * MIB, module="h.0", place=PLACE),
        *(
            Part(
                kind=TensorKind.ACTIVATIONS,
                size=30 * MIB,
                count=2,
                module=f"h.{block}.act",
                place=PLACE,
                library=BELOW,
            )
            for block in range(2)
        ),
    )
    inspected = Inspected(
        moments=(PeakMoment(phase="backward", peak=100 * MIB, parts=parts, operation="mm"),),
        plain=PlainSteps(
            allocated=100 * MIB, reserved=120 * MIB, device=620 * MIB, seconds=(0.1, 0.1)
        ),
        steps=8,
        growths=(
            Growth(
                size=4,
                count=1,
                made=PLACE,
                operation="mean",
                holder="the list losses",
                held_at=PLACE,
            ),
        ),
    )
    root = RootFacts(
        name="Net",
        parameters=10 * MIB,
        parameter_bytes=40 * MIB,
        trainable=10 * MIB,
        dtype="float32",
        batch=8,
    )
    facts = Facts(roots=(root,))
    bf16 = Plan.of({"precision": "bf16"})
    return Explanation(
        script=SCRIPT,
        hardware=H200,
        budget=24 * GIB,
        facts=facts,
        plan=Plan(),
        inspected=inspected,
        out_of_memory=None,
        failed=None,
        techniques=tuple(
            Technique(
                plan=bf16,
                freed=30 * MIB,
                peak=70 * MIB,
                slowdown=0.5,
                fidelity=Fidelity.ROUNDING,
                basis=basis,
                predicted_freed=29 * MIB,
            )
            for basis in Basis
        ),
        cards=cards(),
        follows_leaks=True,
    )


def cards() -> tuple[CardFit, ...]:
    """Return a card that the script fits with a change, and one that it does not fit."""
    whole = FittingPlan(
        plan=Plan(), peak=620 * MIB, kinds={"weights": 40 * MIB, "context": 580 * MIB}, margin=-MIB
    )
    bf16 = replace(whole, plan=Plan.of({"precision": "bf16"}), peak=600 * MIB, margin=19 * MIB)
    sizes = {"size": 14 * GIB, "budget": 619 * MIB}
    return (
        CardFit(name="T4", as_it_is=whole, plan=bf16, fastest=(bf16.plan,), **sizes),
        CardFit(name="V100", as_it_is=whole, plan=None, fastest=(), **sizes),
    )


def fit() -> Fit:
    """Return a fit on two cards with two guesses."""
    told = explanation()
    guesses = (
        Guess(place=PLACE, count=2, decides=True),
        Guess(place=None, count=1, decides=False),
    )
    return Fit(
        script=SCRIPT,
        facts=told.facts,
        inspected=replace(told.inspected, guesses=guesses),
        cards=cards(),
        stopped="",
    )


def check(*, peak: int | None) -> Check:
    """Return a check after another one; ``peak``: ``None`` if it ran out of memory."""
    short = OutOfMemory(phase="forward", message="", requested=2 * GIB, place=PLACE)
    return Check(
        script=SCRIPT,
        memory=24 * GIB,
        peak=peak,
        out_of_memory=short if peak is None else None,
        last_peak=8 * GIB,
        last=datetime(2026, 1, 1, tzinfo=UTC),
        grown=(
            Grown(module="h.1.up", before=1 * GIB, after=2 * GIB, kinds=("weights",)),
            Grown(module="", before=2 * GIB, after=1 * GIB, kinds=("other tensors",)),
        ),
        seconds=5.0,
    )
