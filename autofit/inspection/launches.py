"""Runs a script for a few steps in a trial's sandbox, and returns what held its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofit.exceptions import ScriptError, WorkerError
from autofit.facts import Facts, Hardware
from autofit.inspection.cards import model_named
from autofit.plan import Plan
from autofit.strategies import REGISTRY, SPLIT, Memory, Number, counting
from autofit.strategies.support.block_levels import ALL
from autofit.worker import meter
from autofit.worker.launch.launcher import launch
from autofit.worker.records.inspection import Inspected, Inspection
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchRequest,
    Learned,
    OutOfMemory,
    Script,
    Shortage,
    TrialReport,
    Uncontained,
    Verdict,
)

HEADROOM = 0.05
"""Share of the device that stays free if no budget is given, as in a search."""
SECONDS = 900.0
"""Time limit of a launch."""
WITHOUT_GPU = (("CUDA_VISIBLE_DEVICES", ""), ("TORCHDYNAMO_DISABLE", "1"))
"""Variables with which a script finds no GPU of this machine, and compiles nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is inspected, and where."""

    script: Script
    hardware: Hardware
    budget: int
    """Bytes that the process may occupy on the device."""
    fake: bool = False
    """Whether the process is to believe in a GPU that is not here."""

    @classmethod
    def on(cls, script: Script, *, gpu: str | None = None, memory: int | None = None) -> Target:
        """Return the target on the first visible GPU, or on the CPU.

        Args:
            script: The script.
            gpu: The name of a card that is not here, to predict for.
            memory: The budget in bytes; by default what the device has free, less a headroom.

        Raises:
            UsageError: The card is not known, or a budget cannot be set here.
        """
        if gpu is not None:
            hardware = model_named(gpu).hardware
            free = int((1 - HEADROOM) * hardware.total_bytes)
            return cls(script=script, hardware=hardware, budget=memory or free, fake=True)
        device = meter.default_device()
        meter.require_cap(device)
        hardware = meter.hardware(device)
        free = meter.free_bytes(device) - int(HEADROOM * hardware.total_bytes)
        budget = max(1, free if memory is None else memory)
        return cls(script=script, hardware=hardware, budget=budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """The result of one launch."""

    plan: Plan
    facts: Facts
    inspected: Inspected | None = None
    report: TrialReport | None = None
    """How the launch ended, if it did not end as planned."""
    out_of_memory: OutOfMemory | None = None
    uncontained: bool = False
    """Whether the script's writes to disk were real."""
    stopped: str = ""
    """What ended the script early on a fake GPU, after it had held some memory; else empty."""

    @property
    def fits(self) -> bool:
        """Whether memory was followed, and did not run out."""
        return (
            self.inspected is not None
            and self.inspected.requested is None
            and self.out_of_memory is None
        )


def inspect(target: Target, plan: Plan, inspection: Inspection) -> LaunchOutcome:
    """Run the script under ``plan`` and return what held its memory.

    On a fake GPU no plain steps follow, because nothing is computed.

    Raises:
        ScriptError: The script fails for another reason than memory.
        WorkerError: The process could not be started, or took too long.
    """
    return _run(target, plan, replace(inspection, plain=0) if target.fake else inspection)


def whole(outcome: LaunchOutcome, script: Script) -> LaunchOutcome:
    """Return ``outcome``; raise ``ScriptError`` if a fake GPU could not follow the script."""
    if outcome.stopped:
        raise ScriptError(f"{script.target} cannot be followed without a GPU: {outcome.stopped}")
    return outcome


def measure(target: Target, plan: Plan) -> TrialReport | None:
    """Run the script under ``plan`` as a trial does, and return the report."""
    return _run(target, plan, None).report


def _run(target: Target, plan: Plan, inspection: Inspection | None) -> LaunchOutcome:
    request = LaunchRequest(
        script=target.script,
        plans=(plan,),
        device=target.hardware.device,
        budget=target.budget,
        timeout=SECONDS,
        whole_fits=not plan.splits,
        inspection=inspection,
        fake_gpu=target.hardware if target.fake else None,
        environment=WITHOUT_GPU if target.fake else (),
    )
    facts, inspected, report = Facts(), None, None
    short: OutOfMemory | None = None
    uncontained, ended = False, None
    for event in launch(request, environment=os.environ):
        match event:
            case Learned():
                facts = event.facts
            case Inspected():
                inspected = event
            case Shortage():
                short = event.out_of_memory
            case TrialReport():
                report = event
            case Uncontained():
                uncontained = True
            case LaunchEnded():
                ended = event
    stopped = ""
    if report is not None:
        short = report.out_of_memory or short
        if target.fake and inspected is not None:
            stopped = report.reason.partition(". ")[0]  # torch goes on with a list of backends
        else:
            if report.verdict is Verdict.SCRIPT_FAILED:
                raise ScriptError(f"{target.script.target}: {report.reason}", report.traceback)
            if report.verdict in (Verdict.TIMED_OUT, Verdict.INTERRUPTED):
                raise WorkerError(f"{target.script.target} under {plan}: {report.reason}")
    if ended is not None and ended.lost:
        raise WorkerError(f"{target.hardware.name}: {ended.lost}")
    if inspection is not None and inspected is None and report is None:
        raise ScriptError(_untrained(target.script, ended))
    return LaunchOutcome(
        plan=plan,
        facts=facts,
        inspected=inspected,
        report=report,
        out_of_memory=short if report is None or report.verdict is not Verdict.MEASURED else None,
        uncontained=uncontained,
        stopped=stopped,
    )


def _untrained(script: Script, ended: LaunchEnded | None) -> str:
    steps = 0 if ended is None else ended.steps
    if steps == 0:
        return (
            f"{script.target} ended without an optimizer step: autofit follows the memory of"
            " training; give arguments with which it trains"
        )
    return f"{script.target} ended after {steps} optimizer step: let it train for at least three"


def leaner_plans(facts: Facts, hardware: Hardware) -> Sequence[Plan]:
    """Return plans under which a script may run that does not fit, the smallest change first."""
    from autofit.space.catalogue import clash

    eighth = str(max(1, (facts.batch or 1) // 8))
    blocks = {counting(Number.BLOCKS).name: ALL}
    leanest = {each.name: each.ordered[-1] for each in REGISTRY if each.ordered}
    released = {
        each.name: each.levels[1].name
        for each in REGISTRY
        if each.replays and each.keeps(each.levels[1].name, Memory.GRADIENTS, {}) < 1.0
    }
    steps: tuple[dict[str, str], ...] = (
        {SPLIT: eighth},
        {SPLIT: "1", **blocks},
        {SPLIT: "1", **leanest},
        blocks,
        {**leanest, **released},
    )
    found = []
    for levels in steps:
        plan = Plan.of(levels)
        reasons = (
            strategy.inapplicable(level, facts) or strategy.unavailable(level, hardware)
            for strategy, level in plan
        )
        if not any(reasons) and not clash(plan):
            found.append(plan)
    return found
