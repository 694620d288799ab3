"""One root on the ranks that train it together.

They divide its calls, and may shard its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from autofit.exceptions import Refused
from autofit.strategies.base import Root, Shards, Undo
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.ranks.group import RankGroup, sharing
from autofit.worker.harness.ranks.shared_root import SharedRoot
from autofit.worker.harness.torch_state.undo import together
from autofit.worker.harness.verification.splits import Splits

if TYPE_CHECKING:
    from autofit.worker.harness.ranks.sharded_weights import ShardedWeights


class RootOnRanks:
    """What the ranks of a single-process script do with one root."""

    def __init__(
        self,
        root: Root,
        splits: Splits,
        seams: Seams,
        calls: Calls,
        group: RankGroup | None,
        splits_of: Callable[[nn.Module], Splits],
    ) -> None:
        """``group``: ``None`` if there is one process.

        ``splits_of`` tells how the calls of a submodule are split.
        """
        self._root = root
        self._splits = splits
        self._seams = seams
        self._calls = calls
        self._group = group
        self._splits_of = splits_of
        self._shared: SharedRoot | None = None
        """Divides the calls among ranks; ``None`` where the plan does not."""
        self._sharded: ShardedWeights | None = None
        """The sharded weights, under every plan from the first that shards them."""

    @property
    def weights_sharded(self) -> bool:
        """Whether each rank has a part of the weights."""
        return self._sharded is not None and self._sharded.active

    @property
    def runs_slice(self) -> bool:
        """Whether a rank's slice runs now: then all ranks decide together what becomes of it."""
        return self._shared is not None and self._shared.runs_slice

    def share(self, ranks: int) -> Undo:
        """Divide each call among the ``ranks`` processes of the launch."""
        if self._group is None or self._group.size != ranks:
            started = 1 if self._group is None else self._group.size
            raise Refused(f"the plan needs {ranks} ranks, but the launch has {started}")
        return self._share_among(self._group)

    def _share_among(self, group: RankGroup) -> Undo:
        shared = self._shared = SharedRoot(
            self._splits,
            self._seams,
            group,
            self._calls,
            self._splits_of,
            strict=self._root.strict,
        )
        undo_wrapper = self._root.around_whole(shared.around)

        def undo() -> None:
            undo_wrapper()
            shared.remove()
            self._shared = None

        return self._root.outliving(undo)

    def shard_weights(self, shards: Shards) -> Undo:
        """Shard the weights over the ranks that ``share`` divides the calls among."""
        from autofit.worker.harness.ranks.sharded_weights import ShardedWeights
        from autofit.worker.harness.ranks.whole_tensors import whole_tensors

        group = sharing(self._group, shards)
        undos = [] if self._shared is not None else [self._share_among(group)]
        assert self._shared is not None, "the calls are divided now"
        whole = whole_tensors(group, self._seams)
        if self._sharded is None:
            self._sharded = ShardedWeights(self._root, whole, shards)
        undos += [
            self._sharded.start(self._shared),
            self._root.show_weights(
                lambda parameter, here: whole.seen(parameter, here=here), lambda *_: None
            ),
        ]
        return self._root.outliving(together(*undos))

    def abandon_call(self, error: BaseException, phase: str) -> None:
        """Forget a call that ran out of memory in ``phase``: it is to run again.

        Raises ``error`` if a backward may have added some gradients of sharded weights already.
        """
        if self._sharded is not None and self._sharded.active:
            if phase == "backward":
                raise error
            self._sharded.abandon_call()
