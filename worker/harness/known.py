"""What has been proven of a script's roots, so that no launch of a search proves it again.

The launches of a search run one script on one kind of device: what one of them has proven, the
parent hands to the next. It holds there for the same rank and a root with the same parameters in
the same place, in a call of the same kind. A real run is handed nothing, and proves everything.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import nn
from torch.nn.parameter import is_lazy

from autofit.worker.records import Proven


class Known:
    """Proofs by a key, whose ``repr`` must say the same in every process."""

    def __init__(
        self,
        held: dict[str, bytes] | None = None,
        tell: Callable[[Proven], None] = lambda proven: None,
        of: object = None,
    ) -> None:
        """``held``: what was proven before; ``of``: what all of it is about."""
        self._held = {} if held is None else held
        self._tell = tell
        self._of = _digest(of)

    def of(self, position: int, module: nn.Module) -> Self:
        """Return what is known of one root, the ``position``-th that the script has called."""
        parameters = [
            (name, None if is_lazy(each) else tuple(each.shape), each.dtype)
            for name, each in module.named_parameters()
        ]
        root = self._of, position, type(module).__qualname__, parameters
        return type(self)(self._held, self._tell, root)

    def hear(self, proven: Iterable[Proven]) -> None:
        """Take in what other launches have proven meanwhile."""
        self._held.update({each.key: each.content for each in proven})

    def get(self, *key: object) -> Any:
        """Return what was put there, in this process or in one before it; else ``None``."""
        content = self._held.get(_digest((self._of, key)))
        return None if content is None else pickle.loads(content)

    def put(self, value: object, *key: object) -> None:
        """Hold ``value``, which can be pickled, here and in launches to come; ``None``: nothing."""
        proven = Proven(key=_digest((self._of, key)), content=pickle.dumps(value))
        self._held[proven.key] = proven.content
        self._tell(proven)


def _digest(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()
