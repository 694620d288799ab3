"""A split batch under ``DistributedDataParallel``: local chunks, then one reduction.

A rank that runs out of memory splits its batch further, and the other ranks do not know of it. So
no chunk may communicate. The chunks run the module inside the wrapper. The wrapper's gradient hooks
ignore gradients while its reducer is not prepared, so ``.grad`` accumulates locally. The other work
of ``DistributedDataParallel.forward`` (broadcast of buffers, rebuilding of buckets, ``Join``) is
done once per call.

At the end of the script's own backward, the reducer is prepared. A second backward without any
gradient then visits each parameter that has received one. The wrapper's own hooks reduce ``.grad``
as usual, with any registered communication hook. The ranks send the same buckets in the same order,
split or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.strategies.base import Forward
from autofit.worker.harness.torch_state.modules import is_sharded

SHARDED = (
    "the batch is not split under FSDP: every chunk would gather the weights and "
    "reduce the gradients, with ranks that may run another number of chunks"
)
WRAPPED_INSIDE = "the batch cannot be split if DistributedDataParallel is inside the called model"


class DdpReduction:
    """Does for a split root what ``DistributedDataParallel`` does around forward and backward."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self._expected = False
        """A call has run whose backward ends in a reduction."""
        self._queued = False
        """The running backward will end in the reduction."""
        self._whole = False
        """The running call is in one piece: the wrapper reduces it by itself."""
        self._received: set[int] = set()
        """The ``id`` of each parameter that has received a gradient since the call."""

    @property
    def finds_unused(self) -> bool:
        """Whether the wrapper looks for unused parameters.

        Then only a real backward may mark one as used.
        """
        return bool(self._wrapper.find_unused_parameters)

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the root's chunks as the wrapper runs its module.

        See ``_pre_forward``, ``_post_forward`` in ``torch/nn/parallel/distributed.py``.
        """
        wrapper = self._wrapper
        self._queued = False
        if not self._expected:
            self._received.clear()
        wrapper._pre_forward(None)  # with arguments it would move them to the device again
        reduces = torch.is_grad_enabled() and wrapper.require_backward_grad_sync
        self._whole = False
        output = run()
        if self._whole:
            return wrapper._post_forward(output)
        if wrapper._check_sync_bufs_post_fwd():
            wrapper._sync_buffers()
        wrapper.require_forward_param_sync = reduces
        self._expected = self._expected or reduces
        return output

    def runs_whole(self) -> None:
        """Notice that the call under way does not run in chunks.

        Raises ``Refused`` if the same backward has chunks to reduce: it would reduce twice.
        """
        if self._expected:
            raise Refused("an earlier call in this step ran in parts", SPLIT)
        self._whole = True

    def received(self, parameter: torch.Tensor) -> None:
        """Record that a parameter has received a gradient."""
        self._received.add(id(parameter))

    def backward_done(self) -> None:
        """Queue the reduction.

        Called in the script's own backward when a call's backward has ended.
        """
        if self._expected and not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        """Let the wrapper's hooks reduce the gradients of this rank."""
        self._queued = False
        found = [p for p in self._wrapper.module.parameters() if id(p) in self._received]
        if not found:
            return
        self._expected = False
        with torch.enable_grad():
            visit = _Visit.apply(*found)  # type: ignore[no-untyped-call]
        self._wrapper.reducer.prepare_for_backward([visit] if self.finds_unused else [])
        torch.autograd.backward(visit)


class _Visit(torch.autograd.Function):
    """A function of parameters that sends none of them a gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        """Return zero."""
        ctx.set_materialize_grads(False)
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[None, ...]:
        """Visit the parameters without a gradient: their hooks run, ``.grad`` does not change."""
        return (None,) * int(ctx.count)


def to_device(outer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call of ``outer`` as the model gets them.

    ``DistributedDataParallel`` moves them to its device.
    """
    if not isinstance(outer, DistributedDataParallel) or not outer.device_ids:
        return args, kwargs
    if not (args or kwargs):
        return args, kwargs
    from torch.distributed.utils import _to_kwargs

    device = torch.device(outer.device_type, outer.device_ids[0])
    stream = outer.use_side_stream_for_tensor_copies
    found, named = _to_kwargs(args, kwargs, device, stream)
    return found[0], named[0]


def refuse_what_cannot_be_split(root: nn.Module) -> None:
    """Raise ``Refused`` if chunks of ``root`` would communicate, or would never be reduced."""
    if is_sharded(root):
        raise Refused(SHARDED, SPLIT)
    if any(isinstance(m, DistributedDataParallel) for m in root.modules() if m is not root):
        raise Refused(WRAPPED_INSIDE, SPLIT)
    if isinstance(root, DistributedDataParallel) and (reason := _unsupported(root)):
        raise Refused(f"the batch is not split under DistributedDataParallel {reason}")


def _unsupported(wrapper: DistributedDataParallel) -> str | None:
    """Return the setting of the wrapper that does not work with a split, if there is one."""
    if wrapper.static_graph:
        return "with static_graph: it counts the gradients that arrive in the first step"
    if wrapper.mixed_precision is not None:
        return "with its own mixed_precision: it casts the weights in every forward"
    if wrapper._use_python_reducer or wrapper._delay_all_reduce_all_params:
        return "with a reducer that is not torch's usual one"
    if any(hasattr(p, "_in_backward_optimizers") for p in wrapper.module.parameters()):
        return "with an optimizer that steps in backward"
    forward = vars(wrapper.module).get("forward")
    if str(getattr(forward, "__module__", "")).startswith(("lightning.", "pytorch_lightning.")):
        return "with Lightning, which redirects the module's forward for one call"
    return None


def refuse_collectives(forward: Forward) -> Forward:
    """Return ``forward`` with a check that raises ``Refused`` if ranks communicate in it.

    With different numbers of chunks, ranks that communicate would hang. Every rank makes the first
    call; how many more calls a check makes depends on the rank's own samples.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        before = _collectives()
        output = forward(*args, **kwargs)
        if _collectives() != before:
            reason = "the model communicates with other ranks in its forward"
            raise Refused(reason, SPLIT)
        return output

    return call


def _collectives() -> dict[str, int]:
    """Return how many collectives each process group has counted."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    from torch.distributed.distributed_c10d import _world

    groups: dict[Any, str] = {**_world.pg_names}
    return {
        name: int(group._get_sequence_number_for_group())
        for group, name in groups.items()
        if hasattr(group, "_get_sequence_number_for_group")  # only groups with this rank have it
    }
