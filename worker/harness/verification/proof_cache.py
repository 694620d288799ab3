"""What was verified of a script's roots, so that other processes do not verify it again.

All launches of a search run one script on one kind of device. The parent process passes the results
of one launch to the next, saves them in the store, and passes them to the real run. They are valid
for the same rank and for a root with the same parameters. The ranks of a single-process script all
run the same calls, so they share the results of rank 0, and those of a launch with one process.
They are plain JSON, because a store may come from elsewhere and reading it must not run code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from torch import nn
from torch.nn.parameter import is_lazy

from autofit.plan import Plan
from autofit.worker.records.trials import Proven

ROOT = "something of this root was verified"


class Known:
    """Verified facts by a key. The ``repr`` of a key must be the same in every process."""

    def __init__(
        self,
        held: dict[str, str] | None = None,
        tell: Callable[[Proven], None] = lambda proven: None,
        of: object = None,
    ) -> None:
        """Create a cache.

        ``held``: earlier results; ``tell``: called with each new one; ``of``: part of every key.
        """
        self._held = {} if held is None else held
        self._tell = tell
        self._of = _digest(of)

    def of(self, module: nn.Module) -> Self:
        """Return the cache of one root.

        Two models with the same class and parameters are the same root, such as a new model for
        each fold.
        """
        parameters = [
            (name, None if is_lazy(each) else tuple(each.shape), each.dtype)
            for name, each in module.named_parameters()
        ]
        root = self._of, type(module).__qualname__, parameters
        return type(self)(self._held, self._tell, root)

    def hear(self, proven: Iterable[Proven]) -> None:
        """Add the results of other launches."""
        self._held.update({each.key: each.content for each in proven})

    def get(self, *key: object) -> Any:
        """Return the value that this or an earlier process stored under ``key``, or ``None``."""
        content = self._held.get(_digest((self._of, key)))
        try:
            return None if content is None else json.loads(content)
        except ValueError:  # somebody has edited the store
            return None

    def knows_root(self) -> bool:
        """Return whether anything was verified of this root."""
        return self.get(ROOT) is True

    def put(self, value: object, *key: object) -> None:
        """Store ``value``, plain JSON, for this and later launches; ``None`` deletes it."""
        if value is not None and not self.knows_root():
            self._store(True, ROOT)
        self._store(value, *key)

    def _store(self, value: object, *key: object) -> None:
        proven = Proven(key=_digest((self._of, key)), content=json.dumps(value))
        if self._held.get(proven.key) != proven.content:
            self._held[proven.key] = proven.content
            self._tell(proven)


def _digest(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


PLAN = "what of a plan shows in the gradients"
"""Names this evidence in the store: changing the text makes older stores' evidence unknown."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What rounding weights and inputs to bf16 does to a root's plain call."""

    gradients: float
    """Relative difference of all gradients together."""
    buffers: frozenset[str]
    """Names of the buffers that then change differently."""


class ProofRecord:
    """The findings of one root's checks."""

    def __init__(self, evidence: Known | None = None) -> None:
        """``evidence``: what this process or an earlier one verified of the root."""
        self.evidence = evidence or Known()
        self.proofs = 0
        """Checks made so far. A step that contains a check needs extra time and memory."""
        self.difference: float | None = None
        """Relative difference of the gradients in the latest check."""
        self.sensitivity: Sensitivity | None = None
        """``None`` until a check has measured it."""
        self.noise_measured_here = False
        """This process has checked a plan that rounds, so the noise is that of its own weights."""
        self.autocasts = False
        """The root's own forward enters autocast."""
        self.plain_results: dict[tuple[object, ...], Any] = {}
        """What samples gave without a plan in this call, in which several plans may be checked."""

    def remember(self, plan: Plan) -> None:
        """Record that ``plan`` passed its check, with what the check has found."""
        noise = self.sensitivity
        held = noise and [noise.gradients, sorted(noise.buffers)]
        self.evidence.put([self.autocasts, held], PLAN, plan.in_calls.changes)

    def is_known(self, plan: Plan) -> bool:
        """Return whether ``plan`` passed its check before; take over what that check found.

        Blocks run again one by one. If all of them passed, any number of them does.
        """
        plans = (plan, plan.all_blocks)
        found = next(
            filter(None, (self.evidence.get(PLAN, p.in_calls.changes) for p in plans)), None
        )
        if found is None:
            return False
        autocasts, noise = found
        self.autocasts |= autocasts
        if noise is not None and self.sensitivity is None:
            self.sensitivity = Sensitivity(noise[0], frozenset(noise[1]))
        return True
