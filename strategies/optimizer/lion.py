"""Recognises Lion (Chen et al., 2023), which torch does not have, by its step.

    weights <- weights * (1 - rate * decay) - rate * sign(beta1 * moment + (1 - beta1) * gradient)
    moment  <- beta2 * moment + (1 - beta2) * gradient

Several libraries have such a class, among them ``lion_pytorch`` and bitsandbytes. Two steps of a
copy of the script's optimizer are compared with these formulas.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.strategies.optimizer.bitsandbytes_kernels import Algorithm
from autofit.strategies.support.optimizers import SMALL

SETTINGS = ("lr", "betas", "weight_decay")
"""Settings that each group must have."""
RATE, DECAY = 0.25, 0.1
"""Settings of the two steps. The script's own may be zero during warm-up."""
CLOSE = 0.04
"""Allowed mean difference relative to a step. In half precision a sign near zero may flip."""


def recognised(optimizer: Optimizer) -> Algorithm:
    """Return the form of Lion in ``optimizer``. Raises ``Refused`` for another algorithm."""
    name = type(optimizer).__name__
    overrides = getattr(optimizer, "mng", None)  # of bitsandbytes, for single parameters
    if overrides is not None and (overrides.module_weight_config_triple or overrides.pid2config):
        raise Refused("bitsandbytes' overrides for single parameters are not supported")
    found = set()
    for group in optimizer.param_groups:
        if missing := [each for each in SETTINGS if each not in group]:
            raise Refused(f"{name} has no {missing[0]}: it is not known to be Lion")
        if group["params"]:
            found.add(_tried(optimizer, group))
    if len(found) != 1:
        raise Refused(f"{name} keeps different state in different groups")
    return found.pop()


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> Algorithm:
    """Run two steps of a copy with one group's settings, and compare the result."""
    name = type(optimizer).__name__
    like = group["params"][0]
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = torch.randn(3, SMALL, generator=generator, dtype=torch.float64)
    gradients[1] *= 0.05  # small, so that moment and gradient both matter
    parameter = nn.Parameter(weights.to(like.device, like.dtype))
    state = _stepped(optimizer, group, parameter, gradients)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    kept = [key for key, value in tensors.items() if value.shape == parameter.shape]
    others = [key for key in state if key not in kept and key != "step"]
    if any(state[key].dtype is torch.uint8 for key in kept):
        raise Refused(f"{name} keeps its state in 8 bits already")
    if len(kept) != 1 or others:
        raise Refused(f"{name} keeps {', '.join(map(str, state))}: it is not known to be Lion")
    moment = state[kept[0]]
    if moment.device != parameter.device:
        raise Refused(f"{name} keeps its state on another device already")
    expected, average = _lion(weights, gradients, group["betas"])
    weight_error = (parameter.detach().cpu().double() - expected).abs().mean() / RATE
    moment_error = (moment.cpu().double() - average).abs().mean() / average.abs().mean()
    if not max(float(weight_error), float(moment_error)) < CLOSE:
        raise Refused(f"{name} does not compute what Lion does")
    return Algorithm(
        kernel="lion",
        moments=(kept[0],),
        dtype=None if moment.dtype is parameter.dtype else moment.dtype,
        counter=type(state["step"]) if "step" in state else None,
        rest=_plain,
    )


def _stepped(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    gradients: list[torch.Tensor],
) -> dict[str, Any]:
    """Return the state of ``parameter`` after steps of a copy of ``optimizer``."""
    stand_in: Any = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    stand_in.state = defaultdict(dict)
    settings = {"params": [parameter], "lr": RATE, "weight_decay": DECAY}
    stand_in.param_groups = [{**group, **settings}]
    bare: Callable[[Any], object] = inspect.unwrap(type(optimizer).step)  # inside all hooks
    for gradient in gradients:
        parameter.grad = gradient.to(parameter)
        with torch.no_grad():
            bare(stand_in)
    state: dict[str, Any] = stand_in.state[parameter]
    return state


def _lion(
    weights: torch.Tensor, gradients: list[torch.Tensor], betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the moment after Lion's steps with these gradients."""
    moment = torch.zeros_like(weights)
    for gradient in gradients:
        direction = torch.sign(betas[0] * moment + (1 - betas[0]) * gradient)
        weights = weights * (1 - RATE * DECAY) - RATE * direction
        moment = betas[1] * moment + (1 - betas[1]) * gradient
    return weights, moment


def _plain(optimizer: Any, step: Callable[[], None]) -> None:
    """Run the script's own implementation."""
    step()
