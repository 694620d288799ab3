"""Float32 weights as two halves of 16 bits: the parameter holds bfloat16, its rest the low bits.

bfloat16 is the upper half of float32. A weight and its rest take as many bytes as before, and
joining them restores the float32 value (Kalamkar et al., 2019). One value in 131072 differs in the
last bit, where a tie is rounded down. The script keeps its parameter objects. A value that it
writes into a parameter itself (``p.data.clamp_``) replaces the upper half.

An optimizer step uses float32. Some parameters at a time are joined, with gradients in float32,
then stepped and split again. The optimizer state is float32, as in the script.

The rests are on the parameters' device, or where ``put_rest`` has put them, such as host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Root, Undo
from autofit.strategies.precision import autocast
from autofit.strategies.support.in_float32 import State, change_type, cut, in_a_row, step

_RESTS = WeakTensorKeyDictionary()
"""The low halves of each split parameter's elements, as int16 in its shape."""


# --- one parameter ----------------------------------------------------------------------------


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 ``values`` rounded to bfloat16, and the remaining bits as int16."""
    upper = values.to(torch.bfloat16)
    missing = values.view(torch.int32) - (upper.view(torch.int16).to(torch.int32) << 16)
    return upper, missing.clamp_(-(1 << 15), (1 << 15) - 1).to(torch.int16)


def whole(upper: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of two halves, on the device of ``rest``.

    If the upper half is zero, the rest is ignored. The script may have set the weight to zero.
    """
    upper = upper.detach().to(rest.device)
    joined = upper.view(torch.int16).to(torch.int32) << 16
    joined += rest * (upper != 0)
    return joined.view(torch.float32)


def rest_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the low halves of a parameter, or ``None`` if it is not split."""
    rest: torch.Tensor | None = _RESTS.get(parameter)
    return rest if parameter.dtype is torch.bfloat16 else None


def some_split() -> bool:
    """Return whether any parameter of the process is split."""
    return len(_RESTS) > 0


def type_of(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype that a parameter has for the script."""
    return torch.float32 if rest_of(parameter) is not None else parameter.dtype


def put_rest(parameter: torch.Tensor, rest: torch.Tensor) -> None:
    """Store ``rest``, on any device, as the low halves of a parameter."""
    _RESTS[parameter] = rest


def forget(parameter: torch.Tensor) -> None:
    """Drop the low halves of a parameter."""
    if parameter in _RESTS:
        del _RESTS[parameter]


def script_values(parameter: torch.Tensor, here: bool = False) -> torch.Tensor | None:
    """Return a parameter's values in float32, or ``None`` if it is not split.

    The result is on the device of the rest, or with ``here`` on the parameter's device.
    """
    rest = rest_of(parameter)
    if rest is None:
        return None
    joined = whole(parameter, rest.to(parameter.device))
    return joined if here else joined.to(rest.device)


def loaded(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Store values that the script loads into a parameter, without rounding."""
    rest = rest_of(parameter)
    if rest is not None:
        _write(parameter.data, rest, values.detach().to(parameter.device, torch.float32))


def _write(upper: torch.Tensor, rest: torch.Tensor, values: torch.Tensor) -> None:
    new_upper, new_rest = halves(values)
    upper.copy_(new_upper)
    rest.copy_(new_rest)


# --- the root ---------------------------------------------------------------------------------


def split(root: Root) -> None:
    """Split the trainable parameters of ``root``, also those that become trainable later."""
    module = root.module
    refuse(module)
    undo_show = root.show_weights(script_values, loaded)
    own = WeakTensorKeyDictionary()

    def look_again() -> None:
        for parameter in convertible(module):
            if parameter.requires_grad:
                upper, rest = halves(parameter.data)
                change_type(parameter, upper)
                put_rest(parameter, rest)
                own[parameter] = True

    def wrapper(forward: Callable[..., Any]) -> Callable[..., Any]:
        inner = autocast(forward, torch.bfloat16)

        def call(*args: Any, **kwargs: Any) -> Any:
            look_again()
            return inner(*args, **kwargs)

        return call

    for parameter in module.parameters():
        if rest_of(parameter) is not None:  # split during creation
            own[parameter] = True
    undo_wrap = root.around_forward(wrapper, lasting=True)

    def undo() -> None:
        for parameter in list(own):  # if memory runs out, this one and later ones stay split
            if (values := script_values(parameter, here=True)) is not None:
                change_type(parameter, values)
            forget(parameter)
            del own[parameter]
        undo_wrap()
        undo_show()

    root.taken_back_by(undo)  # memory may run out below
    look_again()


def convertible(module: nn.Module) -> list[nn.Parameter]:
    """Return the float32 parameters, without those of normalization layers.

    BatchNorm's kernels need parameters of the statistics' type. LayerNorm's need the type of the
    input, which may be float32. These parameters are few and small.
    """
    found: dict[int, nn.Parameter] = {}
    for each in module.modules():
        if not isinstance(each, (_NormBase, nn.LayerNorm, nn.GroupNorm)):
            held = each._parameters.values()
            found |= {id(p): p for p in held if p is not None and p.dtype is torch.float32}
    return list(found.values())


def refuse(module: nn.Module) -> None:
    """Raise ``Refused`` if the model would not be the same with parameters of another type."""
    places: dict[int, torch.Tensor] = {}
    early = [parameter for parameter in module.parameters() if rest_of(parameter) is not None]
    trainable = [each for each in (*early, *convertible(module)) if each.requires_grad]
    if not trainable:
        raise Refused("no trainable weight is float32")
    for parameter in trainable:
        if type(parameter) is not nn.Parameter:
            raise Refused(f"a parameter is a {type(parameter).__name__}")
        if parameter.layout is not torch.strided:
            raise Refused("a parameter is sparse")
        storage = parameter.untyped_storage().data_ptr()
        if storage and places.setdefault(storage, parameter) is not parameter:
            raise Refused("two parameters share their memory")


# --- the optimizer ----------------------------------------------------------------------------


def join(handle: OptimizerHandle) -> Undo:
    """Run each step of an optimizer with parameters and gradients in float32."""
    if isinstance(handle.optimizer, LBFGS):
        raise Refused("LBFGS calls the model within its step")
    loading = _Loading()
    hooks = (
        handle.optimizer.register_load_state_dict_pre_hook(loading.begins),
        handle.optimizer.register_load_state_dict_post_hook(loading.ends),
    )
    undo_step = handle.around_step(lambda optimizer, plain: step(optimizer, plain, HALVES))

    def undo() -> None:
        undo_step()
        for hook in hooks:
            hook.remove()

    return undo


class _Halves:
    """Joins parameters before a step, and splits them after it."""

    def opens(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is split."""
        return rest_of(parameter) is not None

    def open(
        self, parameters: Sequence[torch.Tensor], states: Sequence[State]
    ) -> Sequence[torch.Tensor]:
        """Return the float32 values, on the parameters' device."""
        uppers = [parameter.detach() for parameter in parameters]
        rests: list[torch.Tensor] = [_RESTS[parameter] for parameter in parameters]
        if _in_rows(uppers, rests):
            return cut(whole(_row(uppers), _row(rests)), uppers)
        pairs = zip(uppers, rests, strict=True)
        return [whole(upper, rest.to(upper.device, non_blocking=True)) for upper, rest in pairs]

    def close(
        self,
        parameters: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        states: Sequence[State],
    ) -> None:
        """Split ``values``, the result of the step, into the parameters and their rests."""
        rests: list[torch.Tensor] = [_RESTS[parameter] for parameter in parameters]
        if _in_rows(kept, rests) and in_a_row(values):
            new_uppers, new_rests = halves(_row(values))
            torch._foreach_copy_(list(kept), cut(new_uppers, kept))
            torch._foreach_copy_(rests, cut(new_rests, kept))
            return
        for upper, rest, value in zip(kept, rests, values, strict=True):
            _write(upper, rest, value)


def _in_rows(uppers: Sequence[torch.Tensor], rests: Sequence[torch.Tensor]) -> bool:
    """Return whether both halves of several parameters can be concatenated: on one device."""
    return in_a_row(uppers) and in_a_row(rests) and uppers[0].device == rests[0].device


def _row(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.view(-1) for tensor in tensors])


HALVES = _Halves()


class _Loading:
    """Keeps loaded optimizer state in float32. torch would cast it to the parameter's type."""

    def __init__(self) -> None:
        self._document: dict[str, Any] | None = None

    def begins(self, optimizer: Optimizer, document: dict[str, Any]) -> None:
        """Keep a reference to the loaded document."""
        self._document = document

    def ends(self, optimizer: Optimizer) -> None:
        """Store the state in the type in which it was saved."""
        document, self._document = self._document, None
        assert document is not None, "a load begins before it ends"
        order = [index for group in document["param_groups"] for index in group["params"]]
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in zip(order, held, strict=True):
            saved = document["state"].get(index)
            if saved and rest_of(parameter) is not None:
                state = optimizer.state[parameter]
                for name, value in saved.items():
                    there = state.get(name)
                    if isinstance(there, torch.Tensor) and there.dtype == value.dtype:
                        continue  # another strategy has put it elsewhere
                    if isinstance(value, torch.Tensor) and name != "step":
                        state[name] = value.to(parameter.device, copy=True)
