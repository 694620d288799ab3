"""Evidence of verified plans, kept in the store, and how a plan is verified before a real run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.exceptions import StorageError, UsageError, WorkerError
from autofit.plan import Plan
from autofit.storage import EvidenceKey, Store
from autofit.strategies import AUTO, Number
from autofit.worker import meter
from autofit.worker.harness.torch_state.frames import digest_of
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

VERSIONS = ("autofit", "python", "torch", "accelerate", "bitsandbytes", "transformers")
"""Packages whose version may change the training; evidence holds for these versions only."""
PLAN = "plan"
STEPS = 2
"""Optimizer steps of a verification, after the first."""
SECONDS = 900.0
"""Time limit of the launch that verifies."""
HEADROOM = 0.05
"""Share of the device that stays free if no budget is given."""


def key_of(script: Script, *, gpu: str, gpus: int, versions: Mapping[str, str]) -> EvidenceKey:
    """Return the key of the evidence for ``script`` on ``gpus`` devices of the model ``gpu``."""
    relevant = {name: versions[name] for name in VERSIONS if name in versions}
    return EvidenceKey.of(script, gpu=gpu, gpus=gpus, versions=relevant)


class Evidence:
    """The evidence for one script: from the store, and added in this process."""

    def __init__(self, key: EvidenceKey, script: Script, found: Iterable[Proven] = ()) -> None:
        self.key = key
        self._folder = script.cwd
        self._found = {each.key: each for each in found}

    @property
    def proven(self) -> tuple[Proven, ...]:
        """All evidence, in the form that the harness receives."""
        return tuple(self._found.values())

    def holds(self, plan: Plan) -> bool:
        """Return whether ``plan`` was verified and the user's modules have not changed since.

        The micro-batch size is ignored, unless a strategy of the plan depends on the batch size. A
        number of checkpointed blocks was verified if all blocks were.
        """
        if plan.neutral:
            return True
        keys = map(_plan_key, (plan, plan.all_blocks))
        held = next(filter(None, map(self._found.get, keys)), None)
        if held is None:
            return False
        try:
            sources: Sequence[Any] = json.loads(held.content)["sources"]
            return all(digest_of(Path(self._folder, path)) == digest for path, digest in sources)
        except (ValueError, TypeError, KeyError, AttributeError):
            return False

    def add(self, found: Proven | Verified) -> Proven:
        """Add what a process has verified; return its record for the store."""
        if isinstance(found, Verified):
            content = {"plan": dict(found.plan.changes), "sources": found.sources}
            found = Proven(key=_plan_key(found.plan), content=json.dumps(content))
        self._found[found.key] = found
        return found

    def revoke(self, plan: Plan) -> Proven:
        """Revoke the evidence for a plan; return the record for the store."""
        revoked = Proven(key=_plan_key(plan), content="null")
        self._found[revoked.key] = revoked
        return revoked


def stored(storage: str, key: EvidenceKey, script: Script) -> Evidence:
    """Return the evidence in a store; empty if there is no store or it cannot be read."""
    with suppress(StorageError, UsageError), Store(storage, create=False) as store:
        return Evidence(key, script, store.evidence(key))
    return Evidence(key, script)


def _plan_key(plan: Plan) -> str:
    if plan.splits and plan.unsized == plan:
        plan = plan.with_number(Number.SAMPLES, AUTO)
    return hashlib.sha256(repr((PLAN, plan.changes)).encode()).hexdigest()


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
