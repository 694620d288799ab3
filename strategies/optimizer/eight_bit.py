"""Adam, AdamW and Lion with blockwise-quantised 8-bit state, by the kernels of bitsandbytes.

The script keeps its optimizer object, with the groups and the schedule. A parameter of at least
4096 elements stores its moments as 8-bit codes, with one scale for each 256 codes. Smaller
parameters and embeddings keep 32 bits, like ``StableEmbedding`` and Hugging Face's ``Trainer``;
torch's fused kernels step Adam's. A checkpoint holds 32 bits and is made on the host, so saving
needs no memory on the device. A loaded state is quantised one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.optimizer.bitsandbytes_kernels import (
    BLOCK,
    DTYPES,
    LARGEST,
    Algorithm,
    broken,
    dequantise,
    maps,
    on_default_stream,
    quantise,
    update,
)
from autofit.strategies.optimizer.fused import fused_step, place_steps, show
from autofit.strategies.optimizer.fused import why_not as why_not_fused
from autofit.strategies.optimizer.lion import recognised
from autofit.strategies.support.optimizers import LION, SMALL, parameters, without

ADAM = Algorithm(
    kernel="adam", moments=("exp_avg", "exp_avg_sq"), counter=torch.Tensor, rest=fused_step
)

State = dict[str, Any]


def to_eight_bit(handle: OptimizerHandle, level: str) -> Undo:
    """Keep the state of an optimizer in 8 bits, including the present state."""
    return _EightBit(handle, understood(handle.optimizer)).undo


def understood(optimizer: Optimizer) -> Algorithm:
    """Return the algorithm of ``optimizer``; raise ``Refused`` if it has no 8-bit kernel."""
    if reason := why_not(optimizer):
        raise Refused(reason)
    algorithm = ADAM if type(optimizer) in (Adam, AdamW) else recognised(optimizer)
    for device, dtype in {(p.device, p.dtype) for p in parameters(optimizer)}:
        if reason := broken(algorithm.kernel, device, dtype):
            raise Refused(reason)
    return algorithm


def why_not(optimizer: Optimizer) -> str | None:
    """Return why 8-bit state would not be the same algorithm, or ``None``."""
    name = type(optimizer).__name__
    adam = type(optimizer) in (Adam, AdamW)
    if not adam and name not in LION:
        return f"{name} has no 8-bit implementation; torch's Adam and AdamW have one, and Lion"
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group.get(flag):
                return f"{name} with {flag} has no 8-bit implementation"
        if isinstance(group["lr"], torch.Tensor):
            return "its learning rate is a tensor, not a number"
    for parameter in parameters(optimizer):
        if parameter.dtype not in DTYPES:
            return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
        if type(parameter) not in (nn.Parameter, torch.Tensor):
            return f"a parameter is a {type(parameter).__name__}"
    return why_not_fused(optimizer) if adam else None


class _EightBit:
    """The 8-bit state of one optimizer; it is stored in ``optimizer.state``."""

    def __init__(self, handle: OptimizerHandle, algorithm: Algorithm) -> None:
        self._handle = handle
        self._algorithm = algorithm
        self._known: frozenset[int] = frozenset()
        """``id`` of each parameter that ``_sort`` has seen."""
        self._roots = 0
        """Number of roots at the last ``_sort``."""
        self._eight: frozenset[int] = frozenset()
        """``id`` of each parameter with 8-bit state."""
        self._loading: tuple[dict[int, State], list[int]] = {}, []
        optimizer = handle.optimizer
        hooks = (
            optimizer.register_load_state_dict_pre_hook(self._load_begins),
            optimizer.register_load_state_dict_post_hook(self._load_ends),
        )
        undos = (handle.around_step(self.step), handle.show_state(self.show))
        self._undos: list[Undo] = [*(hook.remove for hook in hooks), *undos]
        if any(optimizer.state.get(each) for each in parameters(optimizer)):
            self._begin()

    def _begin(self) -> None:
        """Quantise the state of a running training before its next forward pass."""
        try:
            self._sort(self._handle.optimizer)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the plain 32-bit state on the device of each parameter."""
        while self._undos:
            self._undos.pop()()
        optimizer = self._handle.optimizer
        for parameter in parameters(optimizer):
            state = optimizer.state.get(parameter)
            if state:
                state_dict_view = self.show(parameter, state)
                optimizer.state[parameter] = self._settled(parameter, state_dict_view)
        if self._algorithm is ADAM:
            place_steps(optimizer, on_device=False)

    def step(self, optimizer: Any, plain: Callable[[], None]) -> None:
        """Update the parameters with 8-bit state, then let the others step plainly."""
        roots, held = len(self._handle.modules()), list(parameters(optimizer))
        if roots != self._roots or any(id(each) not in self._known for each in held):
            self._sort(optimizer)
            again = self._known if roots == self._roots else frozenset()
            self._known, self._roots = again | {id(each) for each in held}, roots
        ordered = on_default_stream(held)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._eight and parameter.grad is not None:
                    self._update(group, parameter, self._codes(optimizer, parameter), ordered)
        with without(optimizer, self._eight):
            self._algorithm.rest(optimizer, plain)

    def show(self, parameter: Any, state: State) -> State:
        """Return the state in the plain implementation's form, on the host."""
        algorithm = self._algorithm
        if algorithm.codes[0] not in state:
            return show(parameter, state) if algorithm is ADAM else state
        moments = {
            name: self._dequantised(parameter, state, which)
            for which, name in enumerate(algorithm.moments)
        }
        return {**algorithm.counted(state["step"]), **moments}

    def _sort(self, optimizer: Optimizer) -> None:
        """Choose the parameters with 8-bit state, and convert the present state."""
        if reason := why_not(optimizer):  # what was loaded, or added, may have changed the answer
            raise Refused(reason, "optimizer")
        kept = {
            id(module.weight)
            for root in self._handle.modules()
            for module in root.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        }
        eight: set[int] = set()
        for parameter in parameters(optimizer):
            state = optimizer.state.get(parameter, {})
            coded = self._algorithm.codes[0] in state
            if coded or (id(parameter) not in kept and _worth(parameter)):
                eight.add(id(parameter))
                if state:
                    self._codes(optimizer, parameter)
            elif state:
                optimizer.state[parameter] = self._settled(parameter, state)
        self._eight = self._eight.difference(map(id, parameters(optimizer))) | eight

    def _codes(self, optimizer: Optimizer, parameter: torch.Tensor) -> State:
        """Return the 8-bit state of a parameter; make it from the plain state, or zeros."""
        state: State = optimizer.state[parameter]
        if self._algorithm.codes[0] not in state:
            state = optimizer.state[parameter] = self._quantised(parameter, state)
        return state

    def _update(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        state: State,
        ordered: on_default_stream,
    ) -> None:
        """Step one parameter; Adam adds L2 decay to the gradient, the others decay the weights."""
        assert parameter.grad is not None
        weights = _flat(parameter, parameter)
        gradient = _flat(parameter, parameter.grad.to(parameter.dtype))
        decay = group["weight_decay"]
        if decay and not group.get("decoupled_weight_decay", True):
            gradient, group = gradient.add(weights, alpha=decay), {**group, "weight_decay": 0.0}
        state["step"] += 1
        names = zip(self._algorithm.codes, self._algorithm.scales, strict=True)
        moments = [(state[codes], state[scales]) for codes, scales in names]
        with ordered:
            update(self._algorithm.kernel, group, weights, gradient, moments, state["step"])
        torch.autograd.graph.increment_version(parameter)

    def _quantised(self, parameter: torch.Tensor, state: State) -> State:
        """Return the 8-bit form of a plain state; zeros if that is empty."""
        algorithm, device, count = self._algorithm, parameter.device, parameter.numel()
        found: State = {"step": int(state.get("step", 0))}
        for which, name in enumerate(algorithm.moments):
            codes = torch.zeros(count, dtype=torch.uint8, device=device)
            scales = torch.zeros(-(-count // BLOCK), device=device)
            if name in state:
                moment = state[name].to(device=device, dtype=torch.float32)
                coded, scales = quantise(_flat(parameter, moment), maps(device)[which])
                codes.copy_(coded)
            found[algorithm.codes[which]], found[algorithm.scales[which]] = codes, scales
        return found

    def _dequantised(self, parameter: torch.Tensor, state: State, which: int) -> torch.Tensor:
        """Return one moment in the parameter's shape, memory order and precision, on the host."""
        codes = state[self._algorithm.codes[which]]
        row = dequantise(codes, state[self._algorithm.scales[which]], maps(codes.device)[which])
        dtype = self._algorithm.of(parameter)
        moment = torch.empty_like(parameter, device="cpu", dtype=dtype)
        moment.detach().as_strided((moment.numel(),), (1,)).copy_(row)
        return moment

    def _settled(self, parameter: torch.Tensor, state: State) -> State:
        """Return a plain state on the parameter's device, with its counter in the plain form."""
        dtype = self._algorithm.of(parameter)
        converted = {
            name: value.to(device=parameter.device, dtype=dtype)
            for name, value in state.items()
            if name != "step"
        }
        step = state.get("step", 0)
        counted = isinstance(step, torch.Tensor) and self._algorithm.counter is not None
        return {**({"step": step} if counted else self._algorithm.counted(int(step))), **converted}

    def _load_begins(self, optimizer: Any, document: dict[str, Any]) -> dict[str, Any]:
        """Hold the loaded state back, so that it does not fill the device in 32 bits."""
        order = [index for group in document["param_groups"] for index in group["params"]]
        self._loading = document["state"], order
        return {**document, "state": {}}

    def _load_ends(self, optimizer: Any) -> None:
        """Store the loaded state as it is; the next step quantises it."""
        saved, order = self._loading
        self._loading, self._known = ({}, []), frozenset()
        optimizer.state.clear()
        for index, parameter in zip(order, parameters(optimizer), strict=True):
            if index in saved:
                optimizer.state[parameter] = dict(saved[index])


def _worth(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is large enough and without gaps in memory."""
    dense = parameter.is_contiguous() or any(
        parameter.dim() == dimensions and parameter.is_contiguous(memory_format=form)
        for dimensions, form in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    return dense and SMALL <= parameter.numel() <= LARGEST


def _flat(parameter: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``other`` as one row in the memory order of the parameter; they have one shape."""
    other = other.detach()
    if other.stride() != parameter.stride():
        other = torch.empty_like(parameter, dtype=other.dtype).copy_(other)
    return other.as_strided((other.numel(),), (1,))
