"""Another algorithm in place of the script's Adam or AdamW: different training, with less state.

The optimizer object stays, with its groups, schedule and clipping. Each algorithm converts the
learning rate, which the script chose for Adam; its own best rate may differ. Weight decay stays in
the gradient (Adam) or on the weights (AdamW). Parameters step one after the other.

``state_dict`` holds the state of the new algorithm, and its name under ``"algorithm"``. State of
another algorithm in a loaded checkpoint is dropped, and that parameter starts with empty state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.support.optimizers import parameters

State = dict[str, Any]

UNKNOWN = ("maximize", "capturable", "differentiable")
"""Flags of a group that these algorithms do not support."""


class Recipe(ABC):
    """An algorithm: its state for one parameter, and its step.

    Each state also has ``step``, because Adam's class reads that from a loaded state.
    """

    @abstractmethod
    def initial_state(self, parameter: torch.Tensor) -> State:
        """Return the state before the first step, without ``step``."""

    def fresh(self, parameter: torch.Tensor) -> State:
        """Return the state before the first step."""
        return {"step": torch.tensor(0.0), **self.initial_state(parameter)}

    @abstractmethod
    def step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, rate: float
    ) -> None:
        """Update ``parameter``, whose weights have decayed, and its state."""


class Lion(Recipe):
    """The sign of a moment (Chen et al., 2023), at a tenth of Adam's rate: so its paper tunes it.

    Weights decay by the product of the script's rate and decay, as that paper keeps it.
    """

    BETAS = (0.9, 0.99)
    SHARE = 0.1

    def initial_state(self, parameter: torch.Tensor) -> State:
        """One moment."""
        return {"exp_avg": torch.zeros_like(parameter)}

    def step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, rate: float
    ) -> None:
        """Each weight moves as far as any other."""
        moment = state["exp_avg"]
        direction = moment.lerp(gradient, 1 - self.BETAS[0]).sign_()
        parameter.sub_(direction, alpha=self.SHARE * rate)
        moment.lerp_(gradient, 1 - self.BETAS[1])


class _Momentum(Recipe):
    """SGD with momentum. Each tensor's step is as long as Adam's usually is.

    Plain SGD at Adam's rates changes the weights too little. So the root mean square of a tensor's
    step is set to that of AdamW's steps, as LARS does (You et al., 2017). Liu et al. (2025) measure
    0.2 to 0.4 of the rate for AdamW.
    """

    BETA = 0.9
    LENGTH = 0.2

    def initial_state(self, parameter: torch.Tensor) -> State:
        """One moment."""
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, rate: float
    ) -> None:
        """All weights of a tensor share one divisor."""
        moment = state["momentum_buffer"].lerp_(gradient, 1 - self.BETA)
        length = torch.linalg.vector_norm(moment, dtype=_precise(moment)) / moment.numel() ** 0.5
        scale = (self.LENGTH * rate) / length.clamp_min(1e-30)
        parameter.addcmul_(moment, scale.to(moment.dtype), value=-1)


class Adafactor(Recipe):
    """The second moment as rows and columns (Shazeer and Stern, 2018), no first one.

    At the script's rates: no relative steps, no scaling by the size of the parameter, as Hugging
    Face's ``Trainer`` runs it (torch's own class always scales).
    """

    DECAY = -0.8
    TINY = 1e-30
    THRESHOLD = 1.0

    def initial_state(self, parameter: torch.Tensor) -> State:
        """Sums along the last two dimensions; of a vector, or a number, each square."""
        zeros = partial(parameter.new_zeros, dtype=_precise(parameter))
        if parameter.dim() < 2:
            return {"exp_avg_sq": zeros(parameter.shape)}
        *others, rows, columns = parameter.shape
        return {
            "exp_avg_sq_row": zeros((*others, rows)),
            "exp_avg_sq_col": zeros((*others, columns)),
        }

    def step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, rate: float
    ) -> None:
        """Divide by the root of the second moment; a step that is too long is cut."""
        new = float(state["step"]) ** self.DECAY
        gradient = gradient.to(_precise(gradient))
        square = gradient.square().add_(self.TINY)
        if "exp_avg_sq" in state:
            update = state["exp_avg_sq"].lerp_(square, new).rsqrt().mul_(gradient)
        else:
            row = state["exp_avg_sq_row"].lerp_(square.mean(-1), new)
            column = state["exp_avg_sq_col"].lerp_(square.mean(-2), new)
            share = (row / row.mean(-1, keepdim=True)).rsqrt_()
            update = torch.mul(share.unsqueeze(-1), column.rsqrt().unsqueeze(-2), out=square)
            update.mul_(gradient)
        length = update.square().mean().sqrt_()
        parameter.sub_(update.div_((length / self.THRESHOLD).clamp_min_(1.0)), alpha=rate)


def _precise(tensor: torch.Tensor) -> torch.dtype:
    """Return the precision that sums are made in: at least 32 bits."""
    return torch.promote_types(tensor.dtype, torch.float32)


RECIPES: dict[str, Recipe] = {"lion": Lion(), "sgd": _Momentum(), "adafactor": Adafactor()}
"""By the name of the level."""


def replace(handle: OptimizerHandle, level: str) -> Undo:
    """Train with the algorithm of ``level`` in place of the script's."""
    if reason := why_not(handle.optimizer):
        raise Refused(reason)
    return _ReplacedSteps(handle, level).undo


def why_not(optimizer: Optimizer) -> str | None:
    """Return why no other algorithm can replace this optimizer's, or ``None``."""
    name = type(optimizer).__name__
    if type(optimizer) not in (Adam, AdamW):
        return f"{name} is not torch's Adam or AdamW, whose learning rates are known to carry over"
    for group in optimizer.param_groups:
        for flag in UNKNOWN:
            if group[flag]:
                return f"{name} is {flag}"
        if isinstance(group["lr"], torch.Tensor):
            return "its learning rate is a tensor, not a number"
    for parameter in parameters(optimizer):
        if type(parameter) not in (nn.Parameter, torch.Tensor):
            return f"a parameter is a {type(parameter).__name__}"
        if not parameter.is_floating_point():
            return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            return "a gradient is sparse"
    return None


class _ReplacedSteps:
    """Another algorithm behind one optimizer; its state is in the optimizer's own ``state``."""

    def __init__(self, handle: OptimizerHandle, level: str) -> None:
        self._handle = handle
        self._recipe = RECIPES[level]
        optimizer = handle.optimizer
        hooks = (
            optimizer.register_state_dict_post_hook(
                lambda _, document: {**document, "algorithm": level}
            ),
            optimizer.register_load_state_dict_post_hook(self._settle),
        )
        self._undos: list[Undo] = [*(hook.remove for hook in hooks), handle.around_step(self.step)]
        self._settle(optimizer)

    def undo(self) -> None:
        """Return to the script's own algorithm, with empty state."""
        while self._undos:
            self._undos.pop()()
        self._handle.optimizer.state.clear()

    def step(self, optimizer: Any, plain: Callable[[], None]) -> None:
        """Step each parameter that has a gradient; ``plain`` is not called."""
        if reason := why_not(optimizer):
            raise Refused(reason, "optimizer")
        for group in optimizer.param_groups:
            rate, decay = group["lr"], group["weight_decay"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                if not (state := optimizer.state[parameter]):
                    state.update(self._recipe.fresh(parameter))
                if decay and not group["decoupled_weight_decay"]:
                    gradient = gradient.add(parameter, alpha=decay)
                elif decay:
                    parameter.mul_(1 - rate * decay)
                state["step"] += 1
                self._recipe.step(parameter, gradient, state, rate)

    def _settle(self, optimizer: Optimizer) -> None:
        """Keep state of this algorithm, in the precision that it uses; drop any other state."""
        for parameter in parameters(optimizer):
            state = optimizer.state.pop(parameter, {})
            fresh = self._recipe.fresh(parameter.detach().to("meta"))
            if state.keys() == fresh.keys():
                own = {name: value.to(fresh[name].dtype) for name, value in state.items()}
                optimizer.state[parameter] = own
