"""What was verified of a script: kept in the store, and read before a real run."""

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
from autofit.strategies import AS_IS
from autofit.strategies.micro_batch import AUTO
from autofit.worker.harness.measurement.source_digests import digest_of
from autofit.worker.records.trials import Proven, Script, Verified

VERSIONS = ("autofit", "python", "torch", "accelerate", "bitsandbytes", "transformers")
"""Packages of which another version may make another training."""
PLAN = "plan"


def key_of(script: Script, *, gpu: str, gpus: int, versions: Mapping[str, str]) -> EvidenceKey:
    """Return where evidence of ``script`` on so many devices of this model holds."""
    told = {name: versions[name] for name in VERSIONS if name in versions}
    return EvidenceKey.of(script, gpu=gpu, gpus=gpus, versions=told)


class Evidence:
    """What was verified of one script, as it is in the store and since then."""

    def __init__(self, key: EvidenceKey, script: Script, found: Iterable[Proven] = ()) -> None:
        self.key = key
        self._folder = script.cwd
        self._found = {each.key: each for each in found}

    @property
    def proven(self) -> tuple[Proven, ...]:
        """All of it, for the harness."""
        return tuple(self._found.values())

    def holds(self, plan: Plan) -> bool:
        """Return whether ``plan`` was verified, and no module of the user's was edited since.

        How many samples are in a part of the batch does not matter to that, unless a strategy of
        the plan is made for one size.
        """
        if plan.neutral:
            return True
        held = self._found.get(_plan_key(plan))
        if held is None:
            return False
        try:
            sources: Sequence[Any] = json.loads(held.content)["sources"]
            return all(digest_of(Path(self._folder, path)) == digest for path, digest in sources)
        except (ValueError, TypeError, KeyError, AttributeError):
            return False

    def add(self, found: Proven | Verified) -> Proven:
        """Take in what a process has verified; return it as the store keeps it."""
        if isinstance(found, Verified):
            content = {"plan": dict(found.plan.changes), "sources": found.sources}
            found = Proven(key=_plan_key(found.plan), content=json.dumps(content))
        self._found[found.key] = found
        return found

    def revoke(self, plan: Plan) -> Proven:
        """Take back that a plan was verified; return that as the store keeps it."""
        gone = Proven(key=_plan_key(plan), content="null")
        self._found[gone.key] = gone
        return gone


def stored(storage: str, key: EvidenceKey, script: Script) -> Evidence:
    """Return what a store knows; nothing where there is none, or it cannot be read."""
    with suppress(StorageError, UsageError), Store(storage, create=False) as store:
        return Evidence(key, script, store.evidence(key))
    return Evidence(key, script)


def _plan_key(plan: Plan) -> str:
    if plan["micro_batch"] != AS_IS and plan.unsized == plan:
        plan = plan.replace(micro_batch=AUTO)
    return hashlib.sha256(repr((PLAN, plan.changes)).encode()).hexdigest()
