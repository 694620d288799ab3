"""Shows the script the weights that a plan keeps in another form as it would see them plainly.

``state_dict``, pickles and copies give the script's own values; ``load_state_dict`` takes them.
These are methods of torch's classes, so no module or parameter stores anything. They are patched
only while a plan keeps weights in another form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autofit.strategies.base import Load, Undo, Weights
from autofit.worker.harness.patching.patches import Patches


class WeightViews:
    """The views that plans have registered in one session."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._views: list[tuple[Weights, Load]] = []
        self._undos: list[Undo] = []
        self._handed_out: dict[int, torch.Tensor] | None = None
        """Values by the ``id`` of their parameter, while a ``state_dict`` is made: tied weights
        stay tied."""

    def show(self, view: Weights, load: Load) -> Undo:
        """Pass parameters that leave a module through ``view``, and loaded ones to ``load``."""
        pair = view, load
        self._views.append(pair)
        if not self._undos:
            wrap = self._patches.wrap
            self._undos = [
                wrap(nn.Module, "state_dict", self._state_dict),
                wrap(nn.Module, "_save_to_state_dict", self._save),
                wrap(nn.Module, "_load_from_state_dict", self._load),
                wrap(nn.Parameter, "__deepcopy__", self._copy),
                wrap(nn.Parameter, "__reduce_ex__", self._reduce),
            ]

        def undo() -> None:
            self._views.remove(pair)
            while self._undos and not self._views:
                self._undos.pop()()

        return undo

    def seen(self, parameter: torch.Tensor, *, here: bool = False) -> torch.Tensor | None:
        """Return the values of a parameter as the script sees them; ``None`` if it holds them.

        ``here``: on the device of the parameter.
        """
        found = (view(parameter, here) for view, _ in self._views)
        return next((values for values in found if values is not None), None)

    def script_values(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter, or its values as the script sees them, on its device."""
        values = self.seen(parameter, here=True)
        return parameter if values is None else values

    def _state_dict(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._handed_out is not None:  # of a submodule
                return plain(module, *args, **kwargs)
            self._handed_out = {}
            try:
                return plain(module, *args, **kwargs)
            finally:
                self._handed_out = None

        return state_dict

    def _save(self, plain: Callable[..., None]) -> Callable[..., None]:
        def save(module: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
            plain(module, destination, prefix, keep_vars)
            for name, parameter in () if keep_vars else module._parameters.items():
                if parameter is None or prefix + name not in destination:
                    continue
                known = {} if self._handed_out is None else self._handed_out
                values = known.get(id(parameter))
                if values is None and (values := self.seen(parameter)) is not None:
                    known[id(parameter)] = values
                if values is not None:
                    destination[prefix + name] = values.detach()  # tied weights share memory only

        return save

    def _load(self, plain: Callable[..., None]) -> Callable[..., None]:
        def load(
            module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
        ) -> None:
            plain(module, state_dict, prefix, local_metadata, *args)
            for name, parameter in module._parameters.items():
                values = state_dict.get(prefix + name)
                if parameter is None or not isinstance(values, torch.Tensor) or values is parameter:
                    continue
                if values.shape == parameter.shape:
                    for _, load_values in self._views:
                        load_values(parameter, values)

        return load

    def _copy(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
            if id(parameter) in memo or (values := self.seen(parameter)) is None:
                return plain(parameter, memo)
            copied = memo[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            return copied

        return deepcopy

    def _reduce(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(parameter: nn.Parameter, protocol: Any) -> Any:
            values = self.seen(parameter)
            if values is None:
                return plain(parameter, protocol)
            return plain(nn.Parameter(values, parameter.requires_grad), protocol)

        return reduce
