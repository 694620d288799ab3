"""Decides when an optimizer may step inside backward, and stores gradients in host memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.optimizer_offload.host_steps import HOST_BUDGET
from autofit.strategies.support.memory import on_accelerator
from autofit.strategies.support.optimizers import PER_PARAMETER, in_torch

CLASSES: tuple[type[Optimizer], ...] = in_torch(PER_PARAMETER)
MAX_PENDING = 2
"""Gradients on their way to the host before the next one waits for the first of them."""


def release(handle: OptimizerHandle, *, hosted: bool) -> Undo:
    """Let the parameters of an optimizer step inside backward."""
    if reason := why_not(handle.optimizer):
        raise Refused(reason)
    if not hosted:
        return handle.step_in_backward()
    aside = _Hosted()
    undo_step = handle.step_in_backward(aside)

    def undo() -> None:
        undo_step()
        aside.clear()

    return undo


def why_not(optimizer: Optimizer) -> str | None:
    """Return why steps of single parameters would differ from one step of all, or ``None``."""
    name = type(optimizer).__name__
    if type(optimizer) not in CLASSES:
        return f"{name} may update parameters together; torch's {', '.join(PER_PARAMETER)} do not"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True: backward leads through its step"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "gradients are averaged over ranks after backward has made them"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, nn.Parameter):
                return "the optimizer holds tensors that are not parameters of a module"
            hooks = (parameter._post_accumulate_grad_hooks or {}).values()
            if any(not str(hook.__module__).startswith("autofit.") for hook in hooks):
                return "a hook of the script reads each gradient when backward makes it"
    return None


class _Hosted:
    """Sums of the gradients of several chunks in host memory. Implements ``Aside``.

    On a GPU the copies run on a separate stream. A gradient is freed after its copy. The main
    stream waits for that copy a few gradients later, so the freed memory is reused in stream order.
    """

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        """By ``id`` of the parameter. Pinned if the gradient is on a GPU."""
        self._taken: list[int] = []
        """Reserved bytes of the host memory."""
        self._full: set[int] = set()
        """The ids of parameters whose sums hold a gradient."""
        self._streams: dict[torch.device, torch.Stream] = {}
        self._leaving: list[tuple[torch.Event, torch.Tensor]] = []

    def put(self, parameter: torch.Tensor) -> None:
        """Clear ``parameter.grad``, and add its value to the sum in host memory."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        parameter.grad = None
        if on_accelerator(gradient.device):
            self._leave(id(parameter), gradient)
        else:
            self._add(id(parameter), gradient)

    def bring(self, parameter: torch.Tensor) -> None:
        """Add the sum in host memory to ``parameter.grad``."""
        if id(parameter) not in self._full:
            return
        self._full.discard(id(parameter))
        if stream := self._streams.get(parameter.device):
            of_device = torch.get_device_module(parameter.device)
            of_device.current_stream(parameter.device).wait_stream(stream)
            self._leaving.clear()
        sums = self._sums[id(parameter)]
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, dtype=sums.dtype).copy_(sums)
        else:
            parameter.grad.add_(sums.to(parameter.device, non_blocking=True))

    def clear(self) -> None:
        """Release the host memory."""
        for stream in self._streams.values():
            stream.synchronize()
        self._leaving.clear()
        self._sums.clear()
        self._full.clear()
        while self._taken:
            HOST_BUDGET.give_back(self._taken.pop())

    def _leave(self, key: int, gradient: torch.Tensor) -> None:
        """Add a gradient on the device to its sum, on the separate stream."""
        of_device = torch.get_device_module(gradient.device)
        main = of_device.current_stream(gradient.device)
        stream = self._streams.setdefault(gradient.device, of_device.Stream(gradient.device))
        if len(self._leaving) >= MAX_PENDING:
            through, _ = self._leaving.pop(0)
            main.wait_event(through)
        stream.wait_stream(main)
        with of_device.stream(stream):
            self._add(key, gradient)
        self._leaving.append((stream.record_event(), gradient))

    def _add(self, key: int, gradient: torch.Tensor) -> None:
        sums = self._sums.get(key)
        if sums is None:
            HOST_BUDGET.look()
            if HOST_BUDGET.known and not (taken := HOST_BUDGET.take(gradient.nbytes)):
                raise Refused("the host's memory has no room for the gradients", "gradient_release")
            self._taken += [taken] if HOST_BUDGET.known else []
            sums = self._sums[key] = torch.empty_like(
                gradient, device="cpu", pin_memory=on_accelerator(gradient.device)
            )
        if key in self._full:
            sums.copy_(
                sums.to(gradient.device, non_blocking=True).add_(gradient), non_blocking=True
            )
        else:
            sums.copy_(gradient, non_blocking=True)
        self._full.add(key)
