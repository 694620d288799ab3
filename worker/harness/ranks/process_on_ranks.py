"""What the ranks of a single-process script share beside the roots: optimizer state, and weights.

The weights are those of a model that the script makes, and that does not fit its device.
"""

from __future__ import annotations

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Shards, Undo
from autofit.strategies.support.memory import device_capacity
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.ranks.group import RankGroup, sharing
from autofit.worker.harness.ranks.sharded_state import ShardedStates
from autofit.worker.meter import Meter


class ProcessOnRanks:
    """One process of the ranks that train together."""

    def __init__(self, group: RankGroup | None, seams: Seams, meter: Meter) -> None:
        """``group``: ``None`` if there is one process."""
        self._group = group
        self._seams = seams
        self._meter = meter
        self._states = ShardedStates(group, seams.patches) if group is not None else None

    def shard_state(self, handle: OptimizerHandle, weights: Shards | None) -> Undo:
        """Shard the state of an optimizer over the ranks, beside ``weights`` if these are too."""
        if weights is None:
            if self._states is None:
                raise Refused("there is only one process, so the state cannot be sharded")
            return self._states.shard(handle)
        from autofit.worker.harness.ranks.whole_tensors import follow_weights, whole_tensors

        return follow_weights(handle, whole_tensors(sharing(self._group, weights), self._seams))

    def page_weights(self) -> Undo:
        """Page parameters out while the script creates a model that does not fit."""
        from autofit.worker.harness.ranks.paged_parameters import PagedParameters

        meter = self._meter
        return PagedParameters(
            self._seams,
            self._group,
            meter.device,
            lambda device: device_capacity(device) or meter.capacity,
        ).attach()
