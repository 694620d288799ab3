"""What has been proven of a script's roots, so that no launch of a search proves it again.

The launches of a search run one script on one kind of device: what one of them has proven, the
parent hands to the next. It holds there for a root with the same parameters in the same place, in
a call of the same kind. A real run is handed nothing, and proves everything for itself.
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
        self, given: Iterable[Proven] = (), tell: Callable[[Proven], None] = lambda proven: None
    ) -> None:
        self._held = {each.key: each.content for each in given}
        self._tell = tell
        self._of: tuple[object, ...] = ()

    def of(self, position: int, module: nn.Module) -> Self:
        """Return what is known of one root, the ``position``-th that the script has called."""
        parameters = tuple(
            (name, None if is_lazy(each) else tuple(each.shape), str(each.dtype))
            for name, each in module.named_parameters()
        )
        part = type(self)((), self._tell)
        part._held = self._held
        part._of = (position, type(module).__qualname__, parameters)
        return part

    def get(self, *key: object) -> Any:
        """Return what was put there, in this process or in one before it; else ``None``."""
        content = self._held.get(self._name(key))
        return None if content is None else pickle.loads(content)

    def put(self, value: object, *key: object) -> None:
        """Hold ``value``, which can be pickled, here and in the launches to come."""
        proven = Proven(key=self._name(key), content=pickle.dumps(value))
        self._held[proven.key] = proven.content
        self._tell(proven)

    def _name(self, key: tuple[object, ...]) -> str:
        return hashlib.sha256(repr((self._of, key)).encode()).hexdigest()
