"""torch's other implementations of an optimizer: fused kernels, or one parameter at a time.

The flags are set during a step only, so ``param_groups``, checkpoints and ``GradScaler`` see the
script's own. On CUDA the fused kernels need each parameter's ``step`` counter on the device. In
checkpoints, pickles and copies it is on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.support.optimizers import FOREACH, FUSED, in_torch, parameters, without

CLASSES: tuple[type[Optimizer], ...] = in_torch(FUSED)
FOREACH_CLASSES: tuple[type[Optimizer], ...] = in_torch(FOREACH)
DEVICES = ("cpu", "cuda")
ADAGRAD_ON_CUDA = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def fuse(handle: OptimizerHandle, level: str) -> Undo | None:
    """Run each step with the fused kernels. Return ``None`` if the script does so already."""
    optimizer = handle.optimizer
    if reason := why_not(optimizer):
        raise Refused(reason)
    if all(group["fused"] for group in optimizer.param_groups):
        return None
    undo_step = handle.around_step(fused_step)
    undo_show = handle.show_state(show)

    def undo() -> None:
        undo_show()
        undo_step()
        place_steps(handle.optimizer, on_device=False)
        vars(handle.optimizer).pop("_need_device_dtype_check_for_fused", None)  # set by torch

    return undo


def one_at_a_time(handle: OptimizerHandle, level: str) -> Undo:
    """Step one parameter after the other, if torch would step all at once."""
    optimizer = handle.optimizer
    name = type(optimizer).__name__
    if type(optimizer) not in FOREACH_CLASSES:
        raise Refused(f"{name} has no implementation that takes all parameters at once")
    if any(group.get("fused") for group in optimizer.param_groups):
        raise Refused("the script uses the fused kernels, which need no workspace")
    if not any(_uses_foreach(group) for group in optimizer.param_groups):
        raise Refused(f"{name} takes one parameter at a time here already")
    return handle.around_step(single_step)


def _uses_foreach(group: dict[str, Any]) -> bool:
    """Whether torch steps a group with lists of tensors, as it does on CUDA unless told."""
    if group["foreach"] is not None:
        return bool(group["foreach"])
    differentiable = group.get("differentiable", False)
    return _default_to_fused_or_foreach(group["params"], differentiable)[1]


def why_not(optimizer: Optimizer) -> str | None:
    """Return why the fused kernels would differ from ``optimizer``, or ``None``."""
    name = type(optimizer).__name__
    if type(optimizer) not in CLASSES:
        return f"{name} has no fused implementation; torch's {', '.join(FUSED)} have one"
    if any(group["differentiable"] for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True, which the fused kernels do not support"
    for parameter in parameters(optimizer):
        if not parameter.is_floating_point():
            return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
        if parameter.device.type not in DEVICES:
            return f"a parameter is on {parameter.device.type}"
        if name == "Adagrad" and parameter.is_cuda and not ADAGRAD_ON_CUDA:
            return "this torch has no fused Adagrad on GPUs; 2.13 has"
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            return "a gradient is sparse"
    return None


def fused_step(optimizer: Any, step: Callable[[], None]) -> None:
    """Step with the fused kernels; parameters that they do not support step plainly.

    Such parameters may appear in mid-run, with a sparse gradient or a new group. Parameters with
    their first gradient step separately, because SGD's kernel needs the momentum of all parameters
    or of none.
    """
    place_steps(optimizer, on_device=True)
    plain, new, rest = _three_ways(optimizer)
    if rest or not (plain or new):
        with without(optimizer, plain | new), _flags(optimizer, fused=True, foreach=False):
            step()
    if new:
        with without(optimizer, plain | rest), _flags(optimizer, fused=True, foreach=False):
            step()
    if plain:
        with without(optimizer, new | rest):
            step()


def _three_ways(optimizer: Optimizer) -> tuple[set[int], set[int], set[int]]:
    """Return three sets of parameters, by ``id``.

    The first step plainly. An SGD makes the momentum of the second in this step. The third is the
    rest.
    """
    plain, new, rest = set[int](), set[int](), set[int]()
    makes_momentum = type(optimizer) is torch.optim.SGD
    for group in optimizer.param_groups:
        makes = makes_momentum and bool(group["momentum"])
        for each in group["params"]:
            if (gradient := each.grad) is None:
                continue
            usual = gradient.layout is torch.strided and each.is_floating_point()
            if not (usual and (each.is_cuda or each.is_cpu)):
                plain.add(id(each))
            elif makes and optimizer.state.get(each, {}).get("momentum_buffer") is None:
                new.add(id(each))
            else:
                rest.add(id(each))
    return plain, new, rest


def single_step(optimizer: Any, step: Callable[[], None]) -> None:
    """Step one parameter after the other."""
    with _flags(optimizer, fused=False, foreach=False):
        step()


@contextmanager
def _flags(optimizer: Any, **flags: bool) -> Iterator[None]:
    """Set flags of all groups in the context, if their class has them."""
    groups = optimizer.param_groups
    said = [{name: group[name] for name in flags if name in group} for group in groups]
    for group, known in zip(groups, said, strict=True):
        group.update((name, flags[name]) for name in known)
    try:
        yield
    finally:
        for group, known in zip(groups, said, strict=True):
            group.update(known)


def place_steps(optimizer: Optimizer, *, on_device: bool) -> None:
    """Move each ``step`` counter to the device that the kernels need.

    Each counter is checked: under ``gradient_release`` some parameters have stepped alone.
    """
    for group in optimizer.param_groups:
        there = on_device or group["fused"] or group.get("capturable", False)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state or not isinstance(step := state.get("step"), torch.Tensor):
                continue
            if not there:
                state["step"] = _on_host(step)
            elif step.is_cuda != parameter.is_cuda or step.dtype is not torch.float32:
                state["step"] = step.to(device=parameter.device, dtype=torch.float32)


def show(parameter: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as the plain implementation stores it."""
    step = state.get("step")
    return {**state, "step": _on_host(step)} if isinstance(step, torch.Tensor) else state


def _on_host(step: torch.Tensor) -> torch.Tensor:
    double = torch.get_default_dtype() is torch.float64
    return step.to(device="cpu", dtype=torch.float64 if double else torch.float32)
