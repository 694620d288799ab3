"""Steps an optimizer whose state is in host memory.

A parameter is stepped in pieces. A piece is a view of some elements, with the same part of the
gradient. Its state is a copy on the device. The optimizer, and other levels around its step, treat
a piece as a parameter. Small parameters keep their state on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.exceptions import Refused
from autofit.strategies.activation_offload.saved_tensors import HostBudget
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.support.memory import on_accelerator
from autofit.strategies.support.optimizers import ELEMENTWISE, in_torch, parameters
from autofit.strategies.weights import split_float32

CLASSES: tuple[type[Optimizer], ...] = in_torch(ELEMENTWISE)
SMALL = 1 << 16
"""Parameters with fewer elements keep their state on the device."""
PIECE = 1 << 24
"""Elements of a piece. At most two pieces and their state are on the device at a time."""
MAX_PENDING = 4
"""Pieces whose gradients are held before later computation waits for the first of them."""

HOST_BUDGET = HostBudget()
"""Shared by all optimizers, and by the gradients of ``gradient_release``."""

State = dict[str, Any]


def offload(handle: OptimizerHandle) -> Undo:
    """Keep the state of an optimizer in host memory, from its next step on."""
    if reason := why_not(handle.optimizer):
        raise Refused(reason)
    return StateOffload(handle).undo


def why_not(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step in pieces, or ``None``."""
    name = type(optimizer).__name__
    if type(optimizer) not in CLASSES:
        return f"{name} is not known to update each element by itself; {', '.join(ELEMENTWISE)} do"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True: backward leads through its step"
    if not any(_worth(parameter) for parameter in parameters(optimizer)):
        kinds = {type(each) for each in parameters(optimizer)} - {nn.Parameter, torch.Tensor}
        if kinds:
            return f"a parameter is a {kinds.pop().__name__}"
        return "its parameters are too small to gain from it"
    return None


def state_sizes(optimizer: Optimizer) -> list[int]:
    """Return the bytes of each tensor of the state that leaves the device."""
    kinds = ELEMENTWISE[type(optimizer).__name__]
    if isinstance(optimizer, (Adam, AdamW)) and not optimizer.defaults["amsgrad"]:
        kinds -= 1
    return [4 * each.numel() for each in parameters(optimizer) if _worth(each)] * kinds


def reserve_host_memory(optimizer: Optimizer) -> list[int]:
    """Reserve host memory for the state of ``optimizer``; return the bytes of each tensor.

    Raises ``Refused`` if the host has too little.
    """
    HOST_BUDGET.look()
    sizes = state_sizes(optimizer)
    taken = [HOST_BUDGET.take(size) for size in sizes] if HOST_BUDGET.known else []
    if all(taken):
        return taken
    for each in taken:
        HOST_BUDGET.give_back(each)
    raise Refused("the host's memory has no room for the optimizer's state")


class StateOffload:
    """Keeps the state of one optimizer off the device. It remains in ``optimizer.state``."""

    def __init__(self, handle: OptimizerHandle) -> None:
        self._handle = handle
        self._lanes: dict[torch.device, _Lanes] = {}
        self._hosted = WeakTensorKeyDictionary()
        """State tensors in host memory."""
        self._loading: tuple[dict[int, State], list[int]] = {}, []
        optimizer = handle.optimizer
        self._taken = reserve_host_memory(optimizer)
        hooks = (
            optimizer.register_load_state_dict_pre_hook(self._load_begins),
            optimizer.register_load_state_dict_post_hook(self._load_ends, prepend=True),
        )
        self._undos: list[Undo] = [
            *(hook.remove for hook in hooks),
            handle.around_step(self.step),
        ]
        for parameter in parameters(optimizer):
            if _worth(parameter):
                self._send(optimizer.state.get(parameter, {}), parameter)

    def undo(self) -> None:
        """Move all state back to its usual device."""
        while self._undos:
            self._undos.pop()()
        while self._taken:
            HOST_BUDGET.give_back(self._taken.pop())
        optimizer = self._handle.optimizer
        for parameter in parameters(optimizer):
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value in self._hosted:
                    like = torch.empty_like(parameter, dtype=value.dtype)
                    state[name] = like.detach().copy_(value)
            rest = split_float32.rest_of(parameter)
            if rest is not None and rest in self._hosted:
                like = torch.empty_like(parameter, dtype=rest.dtype)
                split_float32.put_rest(parameter, like.detach().copy_(rest))

    def step(self, optimizer: Any, plain: Callable[[], None]) -> None:
        """Step every parameter that has a gradient. Large ones step in pieces."""
        groups = optimizer.param_groups
        params = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            for group, held in zip(groups, params, strict=True):
                for parameter in held:
                    if parameter.grad is not None and _worth(parameter):
                        self._step(optimizer, group, parameter, plain)
                group["params"] = []
            for group, held in zip(groups, params, strict=True):
                group["params"] = [each for each in held if not _worth(each)]
            if any(each.grad is not None for each in parameters(optimizer)):
                plain()
        finally:
            for group, held in zip(groups, params, strict=True):
                group["params"] = held
        if not self._handle.in_backward:
            for lanes in self._lanes.values():
                lanes.join()

    def _step(
        self, optimizer: Any, group: Any, parameter: torch.Tensor, plain: Callable[[], None]
    ) -> None:
        """Step one parameter piece by piece."""
        state = optimizer.state[parameter]
        self._send(state, parameter)
        weights, gradient = _flat(parameter, parameter), _flat(parameter, parameter.grad)
        before = dict(state)
        count = parameter.numel()
        for start in range(0, count, PIECE):
            part = slice(start, min(start + PIECE, count))
            piece = weights[part]
            with self._lane(parameter, gradient):
                piece.grad = gradient[part]
                with self._up(optimizer, parameter, piece, part, before):
                    group["params"] = [piece]
                    plain()
                    group["params"] = []

    @contextmanager
    def _up(
        self,
        optimizer: Any,
        parameter: torch.Tensor,
        piece: torch.Tensor,
        part: slice,
        before: State,
    ) -> Iterator[None]:
        """Return a context in which a piece has its state on the device.

        At its end the state is copied to the host. ``before`` is the state of the whole parameter
        before this step; it is empty before the first step.
        """
        state, rest = optimizer.state[parameter], split_float32.rest_of(parameter)
        optimizer.state[piece] = {
            name: _to_device(_flat(parameter, value)[part], piece)
            if _like(value, parameter)
            else _copied(value)
            for name, value in before.items()
        }
        if rest is not None:
            above = _to_device(_flat(parameter, rest)[part], piece)
            split_float32.put_rest(piece, above)
        try:
            yield
            for name, value in optimizer.state[piece].items():
                if not _like(value, piece):
                    state[name] = value
                    continue
                if name not in state:
                    state[name] = self._host_tensor(parameter, value.dtype)
                _flat(parameter, state[name])[part].copy_(value, non_blocking=True)
            if rest is not None:
                _flat(parameter, rest)[part].copy_(above, non_blocking=True)
        finally:
            del optimizer.state[piece]

    def _lane(
        self, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> AbstractContextManager[object]:
        if not on_accelerator(parameter.device):
            return nullcontext()
        if parameter.device not in self._lanes:
            self._lanes[parameter.device] = _Lanes(parameter.device)
        return self._lanes[parameter.device].next(gradient)

    def _send(self, state: State, parameter: torch.Tensor) -> None:
        """Move the state of a parameter to the host, if it is not there yet."""
        for name, value in list(state.items()):
            if _like(value, parameter):
                state[name] = self._on_host(parameter, value)
        if (rest := split_float32.rest_of(parameter)) is not None:
            split_float32.put_rest(parameter, self._on_host(parameter, rest))

    def _on_host(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` in host memory, with the parameter's strides.

        If it already is, return ``value`` itself.
        """
        if value in self._hosted and value.stride() == parameter.stride():
            return value
        return self._host_tensor(parameter, value.dtype).copy_(value)

    def _host_tensor(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in host memory with a parameter's shape and strides."""
        if on_accelerator(parameter.device):
            row = torch.empty(parameter.numel(), dtype=dtype, pin_memory=True)
        else:  # tests on a CPU: Python's own memory does not count against the cap
            memory = bytearray(parameter.numel() * dtype.itemsize)
            row = torch.frombuffer(memory, dtype=dtype)
        found = row.as_strided(parameter.shape, parameter.stride())
        self._hosted[found] = True
        return found

    def _load_begins(self, optimizer: Any, document: dict[str, Any]) -> dict[str, Any]:
        """Prevent torch from copying the loaded state to the device."""
        order = [index for group in document["param_groups"] for index in group["params"]]
        self._loading = document["state"], order
        return {**document, "state": {}}

    def _load_ends(self, optimizer: Any) -> None:
        """Store the loaded state as torch would, but in host memory."""
        saved, order = self._loading
        self._loading = {}, []
        optimizer.state.clear()
        for index, parameter in zip(order, parameters(optimizer), strict=True):
            state: State = {}
            for name, value in saved.get(index, {}).items():
                if not _like(value, parameter) or not _worth(parameter):
                    state[name] = _placed(name, value, parameter)
                else:
                    dtype = split_float32.type_of(parameter)
                    state[name] = self._host_tensor(parameter, dtype).copy_(value)
            if state:
                optimizer.state[parameter] = state


class _Lanes:
    """Two alternating streams of a device, and the gradients that they still read.

    A lane owns the memory that it allocates. A gradient belongs to the main stream. That stream
    waits until the lane has read the gradient before the gradient's memory is used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._lanes = deque(self._module.Stream(device) for _ in range(2))
        self._pending: deque[tuple[torch.Event, torch.Tensor]] = deque()

    @contextmanager
    def next(self, gradient: torch.Tensor) -> Iterator[None]:
        """Run the context on the next lane, after the present work of the main stream."""
        main = self._module.current_stream(self._device)
        lane = self._lanes[0]
        self._lanes.rotate()
        lane.wait_stream(main)
        with self._module.stream(lane):
            yield
        self._pending.append((lane.record_event(), gradient))
        while len(self._pending) > MAX_PENDING:
            through, _ = self._pending.popleft()
            main.wait_event(through)

    def join(self) -> None:
        """Wait for both lanes, because the script may read the state in host memory next."""
        for lane in self._lanes:
            lane.synchronize()
        self._pending.clear()


def _to_device(part: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(piece, dtype=part.dtype).copy_(part, non_blocking=True)


def _worth(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is large enough, and has no gaps in memory."""
    if parameter.numel() < SMALL or not parameter.is_floating_point():
        return False
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return dense and type(parameter) in (nn.Parameter, torch.Tensor)


def _like(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a state value has one number for each element of a parameter."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _flat(parameter: torch.Tensor, other: Any) -> torch.Tensor:
    """Return ``other``, of the parameter's shape, as a vector in the parameter's memory order."""
    other = other.detach()
    if other.stride() != parameter.stride():
        other = torch.empty_like(parameter, dtype=other.dtype).detach().copy_(other)
    row: torch.Tensor = other.as_strided((other.numel(),), (1,))
    return row


def _copied(value: Any) -> Any:
    """Return a copy. On an accelerator another lane may have made ``value`` and owns its memory."""
    if not isinstance(value, torch.Tensor):
        return value
    if on_accelerator(value.device):
        value.record_stream(torch.get_device_module(value.device).current_stream(value.device))
    return value.clone()


def _placed(name: str, value: Any, parameter: torch.Tensor) -> Any:
    """Return a loaded value on the device where torch would put it."""
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    if parameter.is_floating_point():
        return value.to(device=parameter.device, dtype=split_float32.type_of(parameter))
    return value.to(device=parameter.device)
