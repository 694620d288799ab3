"""Verifies a plan before a real run, in a short launch whose results are discarded."""

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
from autofit.worker.launch.tasks import Hosts
from autofit.worker.records.trials import (
    LaunchRequest,
    Proven,
    Script,
    TrialReport,
    Verdict,
    Verified,
)

STEPS = 2
"""Optimizer steps of a verification, after the first."""
SECONDS = 900.0
"""Time limit of the launch."""
HEADROOM = 0.05
"""Share of the device that stays free if no budget is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The outcome of a verification."""

    refused: str = ""
    """Why the plan was refused; empty if it was verified, or if the launch showed nothing."""
    blamed: str | None = None
    """The strategy that caused the refusal, if known."""


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
    hosts: Hosts | None = None,
) -> Checked:
    """Run ``script`` for a few steps under ``plan``, and add the result to ``evidence``.

    Files that the script writes meanwhile are discarded, if the system allows it. A launch that
    runs out of memory, or ends before its first step, refuses nothing: the real run can fall back.

    ``ranks`` is the number of processes, ``memory`` the budget in bytes for each device, and
    ``storage`` the store that keeps the evidence. ``hosts``: where the plan's ranks run. Raises
    ``WorkerError`` if one of them is lost.
    """
    total = meter.hardware(device).total_bytes
    free = meter.free_bytes(device) if hosts is None else hosts.free
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
        for event in launch(request, environment=environment, hosts=hosts):
            match event:
                case Proven() | Verified():
                    found.append(evidence.add(event))
                case TrialReport():
                    report = event
    except WorkerError:
        return Checked()
    if report is not None and report.verdict is Verdict.INTERRUPTED and report.killed:
        raise WorkerError(f"the verification lost a rank: {report.reason}")
    if report is not None and _is_refused(report):
        found.append(evidence.revoke(plan))
    if found:
        with suppress(StorageError), Store(storage) as store:
            store.add_evidence(evidence.key, found)
    if report is None or not _is_refused(report):
        return Checked()
    failed = "the script fails under it: " if report.verdict is Verdict.PLAN_FAILED else ""
    return Checked(refused=failed + report.reason, blamed=report.blamed)


def _is_refused(report: TrialReport) -> bool:
    """Return whether the plan caused the failure; an error of the script itself does not count."""
    if report.verdict is Verdict.PLAN_FAILED:
        return not report.own or report.blamed is not None
    return report.verdict is Verdict.REFUSED
