"""What the chunked calls of one root have shown, which decides how later calls run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol
from weakref import WeakSet

import torch

from autofit.worker.harness.patching.gradient_reads import marks
from autofit.worker.harness.torch_state.graph import nodes
from autofit.worker.harness.torch_state.rng import Ambient


class LossScale:
    """The factor by which the script multiplies one root's loss before backward.

    An eager call differentiates its chunks before that. In fp32 and bf16 the gradients can be
    multiplied afterwards. In fp16, gradients without the scale underflow (Micikevicius et al.,
    2018), and with too large a scale they overflow. So the call uses the scale of the previous
    calls, once two of them agreed. If another scale comes in, the chunks run again: the step costs
    a recomputation, and its gradients have its own scale.
    """

    def __init__(self) -> None:
        self.factor: torch.Tensor | None = None
        """The last factor."""
        self.settled = False
        """The last two factors were the same."""
        self._half: dict[Ambient, bool] = {}

    def note(self, factor: torch.Tensor) -> None:
        """Record ``factor``; synchronizes with the device."""
        self.settled = equal_factors(self.factor, factor)
        self.factor = factor.detach().clone()

    def matters(self, ambient: Ambient) -> bool | None:
        """Return whether gradients flow in float16 under ``ambient``; ``None`` before ``learn``."""
        return True if ambient.half else self._half.get(ambient)

    def learn(self, ambient: Ambient, loss: torch.Tensor) -> bool:
        """Search the graph of a loss for float16 gradients; record and return the answer.

        The script may enter autocast inside the model, or have float16 weights.
        """
        made = (each for node in nodes([loss]) for each in node._input_metadata)
        self._half[ambient] = any(each.dtype is torch.float16 for each in made)
        return self._half[ambient]


def equal_factors(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Return whether two factors are equal; NaN equals nothing."""
    return equal_kind(one, other) and one is not None and torch.equal(one, other)


def equal_kind(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Return whether two factors have one data type and device."""
    return one is not None and (one.dtype, one.device) == (other.dtype, other.device)


class Rows(Enum):
    """Where calls keep large outputs beside their loss."""

    NOWHERE = auto()
    """So far, the script has read none, and had none left in a backward or at a step."""
    ON_DEVICE = auto()
    """The script has read one, or had one left."""
    ON_HOST = auto()
    """The script had one left but has read none, and the device is too small for them."""


class ActiveCall(Protocol):
    """A call between its forward and its backward."""

    def release(self) -> None:
        """Free the graph and the gradients that only save a recomputation."""


class CallState:
    """The state that all calls of one chunked root share.

    Calls report what happened; the root and later calls read it.
    """

    def __init__(self, *, can_delay: bool, one_at_a_time: bool) -> None:
        self.loss_scale = LossScale()
        self.can_delay = can_delay
        """Calls may be delayed until the script calls its loss function (``lazy_output``)."""
        self.one_at_a_time = one_at_a_time
        """So far, every backward came before the next call."""
        self.may_add = can_delay
        """So far, the script has left gradients alone between a forward and its backward."""
        self.factor: torch.Tensor | None = None
        """What the loss of the last call was multiplied by that found gradients in ``.grad``."""
        self._differed = False
        """A call that has added was multiplied by another factor."""
        self._take_back: Callable[[], None] | None = None
        """Subtracts what a call has added to ``.grad`` early (``early_gradients``)."""
        self.draws_elsewhere: bool | None = None
        """The root draws from Python's or NumPy's generators; ``None`` before its first call."""
        self.rows = Rows.NOWHERE
        self._rows_were_read = False
        self._before: dict[int, tuple[int, int] | None] = {}
        """The marks of the gradients before the running chunk, by the parameter's ``id``."""
        self._active: WeakSet[ActiveCall] = WeakSet()

    def begin_forward(self, call: ActiveCall) -> None:
        """Make ``call`` active; calls that still wait for their backward free their graphs."""
        self.take_back()
        for other in list(self._active):
            other.release()
        self._active.add(call)

    def adds(self, take_back: Callable[[], None]) -> None:
        """Note that a call has added to ``.grad``, which ``take_back`` undoes."""
        self._take_back = take_back

    def added(self) -> None:
        """Note that the backward of the call that has added has come."""
        self._take_back = None

    def take_back(self) -> None:
        """Let the call that has added to ``.grad`` take that back, and let no call add again."""
        take_back, self._take_back = self._take_back, None
        if take_back is not None:
            self.stop_adding()
            take_back()

    def another_factor(self, *, lost: bool) -> None:
        """Learn the factor again; the second time, or if gradients were lost, let no call add."""
        if lost or self._differed:
            self.stop_adding()
        self.factor, self._differed = None, True

    def stop_adding(self) -> None:
        """Let no call add to ``.grad`` before its backward."""
        self.may_add, self.factor = False, None

    def begin_backward(self, call: ActiveCall, *, released: bool) -> None:
        """End ``call``; ``released``: a later call has freed its gradients before this backward."""
        self._active.discard(call)
        if released:
            self.one_at_a_time = False

    def begin_chunk(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Note the gradients of ``parameters``: a chunk begins that may add to some.

        Parameters that are not given have no gradient.
        """
        self._before = dict(zip(map(id, parameters), marks(parameters), strict=True))

    def arrived(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return those of ``parameters`` that have the running chunk's gradient."""
        now = zip(parameters, marks(parameters), strict=True)
        return [p for p, mark in now if mark != self._before.get(id(p))]

    def missing(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return the trainable ones of ``parameters`` without the running chunk's gradient."""
        there = set(map(id, self.arrived(parameters)))
        return [p for p in parameters if p.requires_grad and id(p) not in there]

    def rows_held(self) -> None:
        """Keep large outputs from the next call on: the script has one that it might read."""
        if self.rows is Rows.NOWHERE:
            self.rows = Rows.ON_DEVICE

    def rows_read(self) -> None:
        """Keep large outputs on the device from the next call on: the script reads them."""
        self.rows, self._rows_were_read = Rows.ON_DEVICE, True

    def rows_short(self) -> bool:
        """Keep large outputs on the host after memory ran out; return whether that frees any."""
        if self.rows is not Rows.ON_DEVICE or self._rows_were_read:
            return False
        self.rows = Rows.ON_HOST
        return True

    def stop_delaying(self) -> None:
        """Run all later calls at once: the script uses more of the output than its loss."""
        self.can_delay = False
