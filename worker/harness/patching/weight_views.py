"""What the script sees of weights that a plan keeps in another form: what it would see plainly.

They leave in a ``state_dict``, in pickles and in copies, and come in ``load_state_dict``. All that
is methods of torch's classes, so nothing is stored in a module or a parameter. They are replaced
while a plan keeps weights otherwise, and are torch's own again after that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autofit.strategies.base import Load, Undo, Weights, Wrapper

_views: list[tuple[Weights, Load]] = []
_undos: list[Undo] = []
_handed_out: list[dict[int, torch.Tensor]] = []
"""By the ``id`` of its parameter, within the ``state_dict`` that is being made: tied stays tied."""


def show(view: Weights, load: Load) -> Undo:
    """Pass parameters through ``view`` wherever they leave, and through ``load`` what comes."""
    pair = view, load
    _views.append(pair)
    if not _undos:
        _attach()

    def undo() -> None:
        _views.remove(pair)
        while _undos and not _views:
            _undos.pop()()

    return undo


class Process:
    """A process before its first root; implements ``strategies.base.Process``."""

    def __init__(self, around: list[Wrapper]) -> None:
        """``around``: what the seams put around calls of models."""
        self._around = around

    def around_calls(self, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of a model."""
        self._around.append(wrapper)
        return lambda: self._around.remove(wrapper)

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Show the script parameters that are kept in another form as they were."""
        return show(view, load)


def seen(parameter: torch.Tensor, *, here: bool = False) -> torch.Tensor | None:
    """Return a parameter's values as the script has them; ``None`` where it holds them itself.

    ``here``: on its device.
    """
    found = (view(parameter, here) for view, _ in _views)
    return next((values for values in found if values is not None), None)


def plainly(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter, or its values as the script has them, on its device."""
    values = seen(parameter, here=True)
    return parameter if values is None else values


def _attach() -> None:
    _replace(nn.Module, "state_dict", _state_dict)
    _replace(nn.Module, "_save_to_state_dict", _save)
    _replace(nn.Module, "_load_from_state_dict", _load)
    _replace(nn.Parameter, "__deepcopy__", _copy)
    _replace(nn.Parameter, "__reduce_ex__", _reduce)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(make(plain)))
    _undos.append(lambda: setattr(owner, name, plain))


def _state_dict(plain: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _handed_out:
            return plain(module, *args, **kwargs)
        _handed_out.append({})
        try:
            return plain(module, *args, **kwargs)
        finally:
            _handed_out.clear()

    return state_dict


def _save(plain: Callable[..., None]) -> Callable[..., None]:
    def save(module: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
        plain(module, destination, prefix, keep_vars)
        for name, parameter in () if keep_vars else module._parameters.items():
            if parameter is None or prefix + name not in destination:
                continue
            known = _handed_out[0] if _handed_out else {}
            values = known.get(id(parameter))
            if values is None and (values := seen(parameter)) is not None:
                known[id(parameter)] = values
            if values is not None:
                destination[prefix + name] = values

    return save


def _load(plain: Callable[..., None]) -> Callable[..., None]:
    def load(
        module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        plain(module, state_dict, prefix, local_metadata, *args)
        for name, parameter in module._parameters.items():
            values = state_dict.get(prefix + name)
            if parameter is None or not isinstance(values, torch.Tensor) or values is parameter:
                continue
            if values.shape == parameter.shape:
                for _, take in _views:
                    take(parameter, values)

    return load


def _copy(plain: Callable[..., Any]) -> Callable[..., Any]:
    def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        if id(parameter) in memo or (values := seen(parameter)) is None:
            return plain(parameter, memo)
        copied = memo[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        return copied

    return deepcopy


def _reduce(plain: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(parameter: nn.Parameter, protocol: Any) -> Any:
        values = seen(parameter)
        if values is None:
            return plain(parameter, protocol)
        return plain(nn.Parameter(values, parameter.requires_grad), protocol)

    return reduce
