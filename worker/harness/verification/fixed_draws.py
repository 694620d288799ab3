"""Runs a model in training mode with fixed values in the place of its random draws.

A forward of a batch can then be compared with forwards of its parts. The mode works below autograd,
where every operator of torch that draws has a tag. Dropout keeps all entries. A draw for each
sample depends on the sample only. A random order of the samples becomes the reversed order, which
no part of the batch can reproduce. A draw for the whole batch is ``chance``, because a model may
mix its samples only if such a number is low, or high. ``unknown`` has the names of other operators
that draw. Python's and NumPy's generators start from the same state each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.worker.harness.batch.layout import Cut

RATES = ("dropout_p", "dropout")
"""Argument names of the dropout rate of fused kernels."""


USUAL, LOW, HIGH = 0.5, 0.02, 0.98
"""What a draw for the whole batch may be."""


class FixedDraws(TorchDispatchMode):
    """Replaces the operators that draw.

    If the first dimension of a draw is the number of samples, each sample has its own value. The
    value is the same in whatever part of the batch the sample runs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cut: Cut = (0, 0)
        self.unknown: set[str] = set()
        """Names of operators that drew random numbers because no fixed value is known."""
        self.drew = False
        """The model would have drawn random numbers."""
        self.chance = USUAL
        """What is drawn for the whole batch, between 0 and 1."""
        self.for_all = False
        """The model has drawn for the whole batch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rates, draws = _draws_of(func)
        if not draws:
            return func(*args, **kwargs)
        for rate, index in rates.items():
            self.drew |= bool(args[index] if index < len(args) else kwargs.get(rate))
            if index < len(args):
                args = (*args[:index], 0.0, *args[index + 1 :])
            elif rate in kwargs:
                kwargs = kwargs | {rate: 0.0}
        if rates:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        fixed, self.drew = _FIXED.get(name), True
        if fixed is None:
            self.unknown.add(name)
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            func(*args, **kwargs)  # the script's own generator moves as it would
        return fixed(self, func, args, kwargs)

    def numbers(self, like: torch.Tensor) -> torch.Tensor:
        """Return numbers between 0 and 1 in the shape of ``like``.

        Each sample has one number; all are ``chance`` if ``like`` has no rows for samples.
        """
        first, stop = self.cut
        if like.ndim == 0 or like.shape[0] != stop - first:
            self.for_all = True
            return torch.full_like(like, self.chance, dtype=torch.float64)
        samples = torch.arange(first, stop, device=like.device, dtype=torch.float64)
        each = ((samples + 1) * 0.6180339887498949 % 1).view(-1, *[1] * (like.ndim - 1))
        return each.expand(like.shape)


@functools.cache
def _draws_of(func: Any) -> tuple[dict[str, int], bool]:
    """Return the positions of an operator's dropout rates, and whether it draws."""
    rates = {
        argument.name: index
        for index, argument in enumerate(func._schema.arguments)
        if argument.name in RATES and argument.type.kind() == "FloatType"
    }
    return rates, bool(rates) or torch.Tag.nondeterministic_seeded in func.tags


Fix = Callable[[FixedDraws, Any, Any, dict[str, Any]], Any]


def _new(scale: Callable[[torch.Tensor], torch.Tensor]) -> Fix:
    """Replace a function that creates a tensor, from a shape or like another tensor."""

    def make(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        made: torch.Tensor = func(*args, **kwargs)
        return scale(draws.numbers(made)).to(made.dtype)

    return make


def _fill(scale: Callable[[torch.Tensor], torch.Tensor]) -> Fix:
    """Replace a method that fills its tensor."""

    def fill(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        target: torch.Tensor = args[0]
        return target.copy_(scale(draws.numbers(target)))

    return fill


def _randint(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Draw the largest allowed number each time: the last sample, if samples are drawn."""
    made: torch.Tensor = func(*args, **kwargs)
    bounds = [each for each in args if isinstance(each, int)]
    return torch.full_like(made, bounds[-1] - 1) if bounds else torch.zeros_like(made)


def _random(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    target: torch.Tensor = args[0]
    return target.fill_(args[-1] - 1 if len(args) > 1 else 1)


def _uniform(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    low = args[1] if len(args) > 1 else 0.0
    high = args[2] if len(args) > 2 else 1.0
    target: torch.Tensor = args[0]
    return target.copy_(low + (high - low) * draws.numbers(target))


def _randperm(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    made: torch.Tensor = func(*args, **kwargs)
    return torch.arange(len(made)).flip(0).to(made)


def _multinomial(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Draw the last entries with a positive probability, in reversed order."""
    made: torch.Tensor = func(*args, **kwargs)
    chances = (args[0] > 0).to(torch.int8)
    order = torch.sort(chances.flip(-1), dim=-1, descending=True, stable=True).indices
    wanted = order[..., : made.shape[-1]]
    short = made.shape[-1] - wanted.shape[-1]
    padded = nn.functional.pad(wanted, (0, short)) if short else wanted
    last: int = chances.shape[-1] - 1
    return (last - padded).to(made)


def _normal(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    made: torch.Tensor = func(*args, **kwargs)
    return made.copy_(args[0] + args[1] * (3 * draws.numbers(made) - 1.5))


def _bernoulli(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Draw 1 for a scalar probability; compare a tensor of probabilities with fixed numbers."""
    filled = func.overloadpacket.__name__.endswith("_")
    target: torch.Tensor = args[0] if filled else torch.empty_like(args[0])
    chances = args[1] if len(args) > 1 else 0.5 if filled else args[0]
    if isinstance(chances, torch.Tensor):
        return target.copy_(chances.detach() > draws.numbers(target))
    return target.fill_(1)


def _typical_value(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a fixed value of the distribution, computed from its first parameter."""
    value: torch.Tensor = args[0].detach()
    if func.overloadpacket.__name__ == "_sample_dirichlet":
        return value / value.sum(-1, keepdim=True)
    return value.round() if "gamma" not in func.overloadpacket.__name__ else value.clone()


def _native_dropout(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kept = torch.ones_like(args[0], dtype=torch.bool)
    return args[0].clone(), kept


def _rrelu(draws: FixedDraws, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Use the smallest allowed slope of a randomized rectifier."""
    lower = args[2] if len(args) > 2 else 0.125
    args[1].copy_(torch.where(args[0] < 0, lower, 1.0))
    result = args[0] * args[1]
    return args[0].copy_(result) if func.overloadpacket.__name__.endswith("_") else result


def _numbers(low: float = 0.0, high: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda numbers: low + (high - low) * numbers


def _ones(numbers: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(numbers)


_FIXED: dict[str, Fix] = {
    **{name: _new(_numbers()) for name in ("rand", "rand_like", "uniform")},
    **{name: _new(_numbers(-1.5, 1.5)) for name in ("randn", "randn_like", "cauchy")},
    **{name: _new(_ones) for name in ("exponential", "geometric")},
    **{
        name: _typical_value
        for name in ("binomial", "poisson", "_standard_gamma", "_sample_dirichlet")
    },
    "log_normal": _new(_numbers(0.5, 1.5)),
    "normal": _normal,
    "bernoulli": _bernoulli,
    "uniform_": _uniform,
    **{name: _fill(_numbers(-1.5, 1.5)) for name in ("normal_", "cauchy_")},
    **{name: _fill(_numbers(0.5, 1.5)) for name in ("exponential_", "log_normal_")},
    "bernoulli_": _bernoulli,
    "geometric_": _fill(_ones),
    **{name: _randint for name in ("randint", "randint_like")},
    "random_": _random,
    "randperm": _randperm,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "_fused_dropout": _native_dropout,
    **{name: _rrelu for name in ("rrelu_with_noise", "rrelu_with_noise_")},
}


@contextmanager
def fixed_draws(module: nn.Module) -> Iterator[FixedDraws]:
    """Run ``module`` with fixed draws; ``unknown`` of the mode says what still draws."""
    recurrent = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    rates = [each.dropout for each in recurrent]
    drop = any(each.training and each.dropout for each in recurrent)
    for each in recurrent:
        each.dropout = 0.0  # cuDNN's recurrent kernel draws internally
    try:
        with FixedDraws() as draws:
            draws.drew = drop
            yield draws
    finally:
        for each, rate in zip(recurrent, rates, strict=True):
            each.dropout = rate


def dropout_rates(module: nn.Module) -> dict[str, float]:
    """Return a module's positive dropout rates by the names of their attributes."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return {"p": module.p} if module.p > 0 else {}
    rates = {name: value for name, value in vars(module).items() if "drop" in name}
    return {name: rate for name, rate in rates.items() if isinstance(rate, float) and rate > 0}


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Set all dropout rates in ``module`` to zero: calls with other draws are then comparable."""
    rates = [(vars(each), dropout_rates(each)) for each in module.modules()]
    for values, found in rates:
        values.update(dict.fromkeys(found, 0.0))
    try:
        yield
    finally:
        for values, found in rates:
            values.update(found)
