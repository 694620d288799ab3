"""Evidence: what has been verified of a script's roots, so that no other process verifies it again.

The launches of a search run one script on one kind of device. What one of them has verified, the
parent hands to the next, keeps in the store, and hands to the real run. It holds there for the same
rank and for a root with the same parameters. It is plain JSON: a store may come from elsewhere, and
reading it must run nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import nn
from torch.nn.parameter import is_lazy

from autofit.worker.records.trials import Proven


class Known:
    """Evidence by a key, whose ``repr`` must say the same in every process."""

    def __init__(
        self,
        held: dict[str, str] | None = None,
        tell: Callable[[Proven], None] = lambda proven: None,
        of: object = None,
    ) -> None:
        """``held``: what was verified before; ``of``: what all of it is about."""
        self._held = {} if held is None else held
        self._tell = tell
        self._of = _digest(of)

    def of(self, module: nn.Module) -> Self:
        """Return what is known of one root.

        A model that a script makes anew, for each fold say, is the same root.
        """
        parameters = [
            (name, None if is_lazy(each) else tuple(each.shape), each.dtype)
            for name, each in module.named_parameters()
        ]
        root = self._of, type(module).__qualname__, parameters
        return type(self)(self._held, self._tell, root)

    def hear(self, proven: Iterable[Proven]) -> None:
        """Take in what other launches have verified meanwhile."""
        self._held.update({each.key: each.content for each in proven})

    def get(self, *key: object) -> Any:
        """Return what was put there, in this process or in one before it; else ``None``."""
        content = self._held.get(_digest((self._of, key)))
        try:
            return None if content is None else json.loads(content)
        except ValueError:  # somebody has edited the store: it is verified anew
            return None

    def put(self, value: object, *key: object) -> None:
        """Hold ``value``, plain JSON, here and in launches to come; ``None``: nothing."""
        proven = Proven(key=_digest((self._of, key)), content=json.dumps(value))
        if self._held.get(proven.key) != proven.content:
            self._held[proven.key] = proven.content
            self._tell(proven)


def _digest(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()
