"""Evidence of verified plans: kept in the store, and read before a real run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from autofit.exceptions import StorageError, UsageError
from autofit.plan import Plan
from autofit.storage import EvidenceKey, Store
from autofit.strategies import AUTO, Number
from autofit.worker.harness.torch_state.frames import digest_of
from autofit.worker.records.trials import Proven, Script, Verified

VERSIONS = ("autofit", "python", "torch", "accelerate", "bitsandbytes", "transformers")
"""Packages whose version may change the training; evidence holds for these versions only."""
PLAN = "plan"


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
