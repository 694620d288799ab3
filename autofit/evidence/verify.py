"""Verifies a plan before a real run, in a short launch of its own that is thrown away."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from autofit.evidence.lookup import Evidence
from autofit.exceptions import StorageError, WorkerError
from autofit.plan import Plan
from autofit.storage import Store
from autofit.worker import meter
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchRequest,
    Proven,
    Script,
    TrialReport,
    Verdict,
    Verified,
)

STEPS = 2
"""Optimizer steps that a plan takes to be verified, after the first."""
SECONDS = 900.0
"""The launch is ended after so long."""
HEADROOM = 0.05
"""Share of the device that is left free where no budget was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What came of a plan in its own launch."""

    refused: str = ""
    """Why it does not keep its promise; empty where it does, or where nothing could be said."""
    blamed: str | None = None


def verify(
    script: Script,
    plan: Plan,
    evidence: Evidence,
    *,
    device: str,
    ranks: int,
    memory: int | None,
    environment: Mapping[str, str],
    storage: str,
) -> Checked:
    """Run ``script`` for a few steps under ``plan``; add what that verifies to ``evidence``.

    What the script writes meanwhile is thrown away, where the system allows. A launch that runs out
    of memory, or ends before a step was taken, refuses nothing: a real run has ways to go on.
    """
    total, free = meter.hardware(device).total_bytes, meter.free_bytes(device)
    request = LaunchRequest(
        script=script,
        plans=(plan,),
        device=device,
        budget=memory or max(1, int(free - HEADROOM * total)),
        timeout=SECONDS,
        steps=STEPS,
        ranks=ranks,
        proven=evidence.proven,
    )
    found: list[Proven] = []
    report: TrialReport | None = None
    try:
        for event in launch(request, environment=environment):
            match event:
                case Proven() | Verified():
                    found.append(evidence.add(event))
                case TrialReport():
                    report = event
    except WorkerError:
        return Checked()
    if report is not None and _is_refused(report):
        found.append(evidence.revoke(plan))
    if found:
        with suppress(StorageError), Store(storage) as store:
            store.add_evidence(evidence.key, found)
    if report is None or not _is_refused(report):
        return Checked()
    return Checked(refused=report.reason, blamed=report.blamed)


def _is_refused(report: TrialReport) -> bool:
    """Return whether a report is against the plan: an error of the script's own is not."""
    if report.verdict is Verdict.PLAN_FAILED:
        return not report.own or report.blamed is not None
    return report.verdict is Verdict.REFUSED
