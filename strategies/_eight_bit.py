"""Adam and AdamW with blockwise-quantised 8-bit state, by the kernels of bitsandbytes.

Only its kernels: the script's own optimizer object stays, with its groups and its schedule. A
parameter of at least 4096 elements keeps its two moments as 8-bit codes, with one scale for each
256 of them; smaller ones and embeddings keep 32 bits (as ``StableEmbedding`` and Hugging Face's
``Trainer`` do) and step with torch's fused kernels. What is saved is 32 bits, and on the host, so
that saving needs no memory on the device; what is loaded is quantised one parameter at a time.

Importing bitsandbytes initialises CUDA, so it is imported when the first optimizer is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from autofit.exceptions import Refused
from autofit.strategies._fused import fused_step, parameters, place_steps, show
from autofit.strategies._fused import why_not as why_not_fused
from autofit.strategies.base import OptimizerHandle, Undo

BLOCK = 256
"""Elements that share a scale; the kernels' own."""
SMALL = 4096
"""Elements below which a parameter keeps 32 bits; bitsandbytes' own."""
LARGEST = 2**31 - 1
"""The kernels count elements in 32 bits."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the two moments in the plain state."""
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES = ("exp_avg_scales", "exp_avg_sq_scales")

State = dict[str, Any]


def to_eight_bit(handle: OptimizerHandle) -> Undo:
    """Keep the state of an optimizer in 8 bits from its next step on."""
    optimizer = handle.optimizer
    if reason := why_not(optimizer):
        raise Refused(reason)
    for device, dtype in {(p.device, p.dtype) for p in parameters(optimizer)}:
        if reason := broken(device, dtype):
            raise Refused(reason)
    return EightBit(handle).undo


def why_not(optimizer: Optimizer) -> str | None:
    """Return why 8-bit state would not be the same algorithm, or ``None``."""
    name = type(optimizer).__name__
    if type(optimizer) not in (Adam, AdamW):
        return f"{name} has no 8-bit implementation; torch's own Adam and AdamW have"
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group[flag]:
                return f"{name} with {flag} has no 8-bit implementation"
        if isinstance(group["lr"], torch.Tensor):
            return "its learning rate is a tensor"
    for parameter in parameters(optimizer):
        if parameter.dtype not in DTYPES:
            return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
        if type(parameter) not in (nn.Parameter, torch.Tensor):
            return f"a parameter is a {type(parameter).__name__}"
    return why_not_fused(optimizer)


class EightBit:
    """The 8-bit state of one optimizer, kept in its ``state``: it moves and goes with that."""

    def __init__(self, handle: OptimizerHandle) -> None:
        self._handle = handle
        self._known: tuple[int, ...] = ()
        """What the parameters were sorted by."""
        self._eight: frozenset[int] = frozenset()
        """Identities of the parameters with 8-bit state."""
        self._loading: tuple[dict[int, State], list[int]] = {}, []
        optimizer = handle.optimizer
        hooks = (
            optimizer.register_load_state_dict_pre_hook(self._load_begins),
            optimizer.register_load_state_dict_post_hook(self._load_ends),
        )
        undos = (handle.around_step(self.step), handle.show_state(self.show))
        self._undos: list[Undo] = [*(hook.remove for hook in hooks), *undos]

    def undo(self) -> None:
        """Give the plain state back, in 32 bits, where it would have been."""
        while self._undos:
            self._undos.pop()()
        optimizer = self._handle.optimizer
        for parameter in parameters(optimizer):
            state = optimizer.state.get(parameter)
            if state:
                optimizer.state[parameter] = _settled(parameter, self.show(parameter, state))
        place_steps(optimizer, on_device=False)

    def step(self, optimizer: Any, plain: Callable[[], None]) -> None:
        """Update the parameters with 8-bit state, and let ``plain`` update the others."""
        held = list(parameters(optimizer))
        known = (len(self._handle.modules()), *map(id, held))
        if known != self._known:
            self._sort(optimizer)
            self._known = known
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        for group in groups:
            with _on_default_stream(group["params"]):
                for parameter in group["params"]:
                    if id(parameter) in self._eight and parameter.grad is not None:
                        state = optimizer.state[parameter]
                        if not state:
                            state.update(_quantised(parameter, {}))
                        _update(group, parameter, state)
            group["params"] = [p for p in group["params"] if id(p) not in self._eight]
        try:
            fused_step(optimizer, plain)
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def show(self, parameter: Any, state: State) -> State:
        """Return the state as the plain implementation has it, on the host."""
        if CODES[0] not in state:
            return show(parameter, state)
        moments = {
            name: _dequantised(parameter, state, which) for which, name in enumerate(MOMENTS)
        }
        return {"step": torch.tensor(float(state["step"])), **moments}

    def _sort(self, optimizer: Optimizer) -> None:
        """Decide which parameters have 8-bit state, and bring what state there is into form."""
        if reason := why_not(optimizer):  # what was loaded, or added, may have changed the answer
            raise Refused(reason, "optimizer")
        kept = {
            id(module.weight)
            for root in self._handle.modules()
            for module in root.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        }
        eight = set()
        for parameter in parameters(optimizer):
            state = optimizer.state.get(parameter, {})
            if CODES[0] in state or (id(parameter) not in kept and _worth(parameter)):
                eight.add(id(parameter))
                if MOMENTS[0] in state:
                    optimizer.state[parameter] = _quantised(parameter, state)
            elif state:
                optimizer.state[parameter] = _settled(parameter, state)
        self._eight = frozenset(eight)

    def _load_begins(self, optimizer: Any, document: dict[str, Any]) -> dict[str, Any]:
        """Keep the state from being put on the device in 32 bits."""
        order = [index for group in document["param_groups"] for index in group["params"]]
        self._loading = document["state"], order
        return {**document, "state": {}}

    def _load_ends(self, optimizer: Any) -> None:
        """Take what was loaded as it lies; the next step brings it into form."""
        saved, order = self._loading
        self._loading, self._known = ({}, []), ()
        optimizer.state.clear()
        for index, parameter in zip(order, parameters(optimizer), strict=True):
            if index in saved:
                optimizer.state[parameter] = dict(saved[index])


def _worth(parameter: torch.Tensor) -> bool:
    """Whether a parameter is worth 8 bits, and lies in memory without gaps."""
    dense = parameter.is_contiguous() or any(
        parameter.dim() == dimensions and parameter.is_contiguous(memory_format=form)
        for dimensions, form in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    return dense and SMALL <= parameter.numel() <= LARGEST


def _flat(parameter: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``other``, of the parameter's shape, as one row in the order of its memory."""
    other = other.detach()
    if other.stride() != parameter.stride():
        other = torch.empty_like(parameter, dtype=other.dtype).copy_(other)
    return other.as_strided((other.numel(),), (1,))


def _update(group: dict[str, Any], parameter: torch.Tensor, state: State) -> None:
    """Take one step of Adam; with L2 decay in the gradient, or AdamW's on the weights."""
    functional = bitsandbytes()
    assert parameter.grad is not None
    weights = _flat(parameter, parameter)
    gradient = _flat(parameter, parameter.grad.to(parameter.dtype))
    decay, (beta1, beta2) = group["weight_decay"], group["betas"]
    if decay and not group["decoupled_weight_decay"]:
        gradient, decay = gradient.add(weights, alpha=decay), 0.0
    state["step"] += 1
    functional.optimizer_update_8bit_blockwise(
        "adam",
        gradient,
        weights,
        state[CODES[0]],
        state[CODES[1]],
        beta1,
        beta2,
        0.0,
        0.0,
        group["eps"],
        state["step"],
        group["lr"],
        *maps(parameter.device),
        state[SCALES[0]],
        state[SCALES[1]],
        weight_decay=decay,
    )
    torch.autograd.graph.increment_version(parameter)


def _quantised(parameter: torch.Tensor, state: State) -> State:
    """Return the 8-bit state of a plain one, or of none: then zeros."""
    found: State = {"step": int(state.get("step", 0))}
    count = parameter.numel()
    for which, name in enumerate(MOMENTS):
        if name in state:
            moment = state[name].to(device=parameter.device, dtype=torch.float32)
            found[CODES[which]], found[SCALES[which]] = quantise(
                _flat(parameter, moment), maps(parameter.device)[which]
            )
        else:
            device = parameter.device
            found[CODES[which]] = torch.zeros(count, dtype=torch.uint8, device=device)
            found[SCALES[which]] = torch.zeros(-(-count // BLOCK), device=device)
    return found


def _dequantised(parameter: torch.Tensor, state: State, which: int) -> torch.Tensor:
    """Return one moment in the parameter's shape, order and precision, on the host."""
    codes = state[CODES[which]]
    row = dequantise(codes, state[SCALES[which]], maps(codes.device)[which])
    moment = torch.empty_like(parameter, device="cpu")
    moment.detach().as_strided((moment.numel(),), (1,)).copy_(row)
    return moment


def _settled(parameter: torch.Tensor, state: State) -> State:
    """Return a plain state on the parameter's device, its counter on the host as torch has it."""
    moved = {
        name: value.to(device=parameter.device, dtype=parameter.dtype)
        for name, value in state.items()
        if name != "step"
    }
    step = state["step"]
    return {"step": step if isinstance(step, torch.Tensor) else torch.tensor(float(step)), **moved}


# --- bitsandbytes -----------------------------------------------------------------------------


@cache
def bitsandbytes() -> Any:
    """Return ``bitsandbytes.functional``; it says on import what else one might install."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        import bitsandbytes.functional
    finally:
        logger.setLevel(level)
    return bitsandbytes.functional


@cache
def maps(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the 256 codes: of the first moment, signed, and of the second."""
    functional = bitsandbytes()
    signed, unsigned = (functional.create_dynamic_map(signed=each) for each in (True, False))
    return signed.to(device), unsigned.to(device)


def quantise(row: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scales of a row of float32."""
    codes, state = bitsandbytes().quantize_blockwise(row, code=values, blocksize=BLOCK)
    return codes, state.absmax


def dequantise(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the row of float32 that codes and scales stand for."""
    row: torch.Tensor = bitsandbytes().dequantize_blockwise(
        codes, absmax=scales, code=values, blocksize=BLOCK
    )
    return row


class _on_default_stream:
    """Orders the kernels, which run on CUDA's default stream, with torch's present stream."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        devices = {p.device for p in params if p.is_cuda}
        present = [torch.cuda.current_stream(device) for device in devices]
        self._streams = [(s, torch.cuda.default_stream(s.device)) for s in present]

    def __enter__(self) -> None:
        for present, default in self._streams:
            if present != default:
                default.wait_stream(present)

    def __exit__(self, *_: object) -> None:
        for present, default in self._streams:
            if present != default:
                present.wait_stream(default)


@cache
def broken(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not work here, or ``None``: one step from zeros is known."""
    try:
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(SMALL, generator=generator).to(device, dtype)
        parameter = torch.zeros(SMALL, device=device, dtype=dtype)
        parameter.grad = gradient
        group = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}
        _update(group, parameter, _quantised(parameter, {}))
        expected = -0.5 * gradient.float().sign()
        wrong = float((parameter.float() - expected).abs().median()) > 0.01
    except (ImportError, RuntimeError, AttributeError) as error:
        first = str(error).strip().partition("\n")[0]
        return f"bitsandbytes does not work on {device.type}: {first or type(error).__name__}"
    where = f"bitsandbytes {version('bitsandbytes')} on {device.type} in {dtype}"
    return f"{where}: its kernels compute something else" if wrong else None
