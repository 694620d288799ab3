"""The optimizer steps inside backward: each gradient is used once it is complete, and freed.

torch's ``register_post_accumulate_grad_hook`` reports each new gradient. In a split call the
gradient is complete with the last chunk. Then the parameter steps; small parameters step together.
The script's own ``step`` updates the rest.

The plan is refused when the script could see a difference: it reads or changes gradients before
its step, adds a second gradient, or changes a setting of the optimizer in between.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from autofit.exceptions import Refused
from autofit.strategies.base import Aside
from autofit.strategies.support.optimizers import parameters, without
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.torch_state.undo import temporarily

READ = "the script reads the gradients between its backward and its step: it clips or logs them"
AGAIN = "a second gradient arrives before the optimizer's step"
TOGETHER = 32 << 20
"""Most bytes of gradients that step together. A step costs some 0.2 ms of Python and kernel
launches, whatever its size."""
PART = 32
"""At most one part in so many of all gradients waits to step together."""
RATES = "the script changes the optimizer's settings between its backward and its step"


class SteppedOptimizer(Protocol):
    """An optimizer whose step a plan has changed: ``optimizers.HarnessOptimizer``."""

    @property
    def optimizer(self) -> Optimizer:
        """The script's own optimizer."""

    def take(self) -> None:
        """Step the parameters that the optimizer holds now."""


class Release:
    """The steps in backward of one optimizer, until ``stop``."""

    def __init__(
        self, handle: SteppedOptimizer, seams: Seams, aside: Aside | None, strategy: str | None
    ) -> None:
        """``strategy``: the name of the one that asks for it, to which a refusal is due."""
        self._handle, self._strategy = handle, strategy
        self._seams = seams
        self._aside = aside
        self._hooks: list[RemovableHandle] = []
        self._groups: dict[int, int] = {}
        """``id`` of each parameter with a hook of ours, and the index of its group."""
        self._waiting: dict[int, torch.Tensor] = {}
        """Parameters with a complete gradient, by ``id``; they will step together."""
        self._most = 0
        """They step when their gradients reach so many bytes."""
        self._stepped: set[int] = set()
        """``id`` of the parameters that stepped before the script called ``step``."""
        self._settings: list[dict[str, Any]] = []
        """Settings of the groups when the first parameter stepped."""
        self.steps = False
        """True while parameters step in backward."""
        self._ours = False
        """True while this class reads gradients itself."""
        self._look_again()
        self._undo_listening = seams.gradient_reads.listen(self._read)
        seams.stepping.append(strategy)
        self._end = weakref.finalize(handle.optimizer, self._stop)

    def stop(self) -> None:
        """Remove all hooks; this also happens when the optimizer is freed."""
        self._end()

    def _stop(self) -> None:
        self._seams.stepping.remove(self._strategy)
        self._undo_listening()
        self._forget()

    def step(self) -> None:
        """Step the parameters that have not stepped in backward."""
        optimizer = self._handle.optimizer
        self._waiting.clear()
        with temporarily(self, "_ours", True):
            if self._stepped:
                if not _alike(self._settings, _settings(optimizer)):
                    raise Refused(RATES, self._strategy)
                if any(p.grad is not None for p in parameters(optimizer) if id(p) in self._stepped):
                    raise Refused(AGAIN, self._strategy)
            if self._aside is not None:  # the last chunk may not use every parameter
                for parameter in parameters(optimizer):
                    self._aside.bring(parameter)
            self._handle.take()
        self._stepped.clear()
        self._look_again()

    def _look_again(self) -> None:
        """Put a hook on each parameter, again if groups were added."""
        optimizer = self._handle.optimizer
        found = {
            id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        if found == self._groups:
            return
        self._forget()
        self._groups = found
        trained = [p for p in parameters(optimizer) if p.requires_grad]
        self._most = min(TOGETHER, sum(p.nbytes for p in trained) // PART)
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in trained]

    def _forget(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Use the new gradient of ``parameter``. Runs in backward, maybe in another thread."""
        if torch.is_grad_enabled():
            raise Refused("the script differentiates gradients (create_graph)", self._strategy)
        if id(parameter) in self._stepped:
            raise Refused(AGAIN, self._strategy)
        self._ours = True
        try:
            if self._seams.parts_follow:
                if self._aside is not None:
                    self._aside.put(parameter)
                return
            if self._aside is not None:
                self._aside.bring(parameter)
            self._waiting[id(parameter)] = parameter
            if sum(each.nbytes for each in self._waiting.values()) >= self._most:
                self._step_together()
        finally:
            self._ours = False  # not what it was before: another thread of backward may be here

    def _step_together(self) -> None:
        """Step the parameters with complete gradients, and free these."""
        optimizer = self._handle.optimizer
        complete = {key: each for key, each in self._waiting.items() if each.grad is not None}
        self._waiting.clear()
        if not self._stepped:
            self._settings = _settings(optimizer)
        for parameter in complete.values():
            for watcher in self._seams.watchers:
                watcher.parameter_steps(optimizer, parameter)
        others = {id(each) for each in parameters(optimizer)} - complete.keys()
        self.steps = True
        try:
            with without(optimizer, others):
                self._handle.take()
        finally:
            self.steps = False
        self._stepped.update(complete)
        for parameter in complete.values():
            parameter.grad = None
            torch.autograd.graph.increment_version(parameter)  # some kernels write past autograd

    def _read(self, parameter: nn.Parameter) -> None:
        if self._stepped and not self._ours and id(parameter) in self._groups:
            raise Refused(READ, self._strategy)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups without their parameters."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
