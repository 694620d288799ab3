"""The tolerances of all gradient checks, each with the measurement that it rests on. Imports no
torch.

In float64 the order of sums makes almost no difference, so everything must be equal there
(``float64.py``). Where float64 cannot run, the shares of the chunks' gradients decide. Gradients
under a plan that rounds may differ as much as rounding the weights to bf16 changes them.
``benchmarks/verdicts.py`` measures how often these tolerances decide wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """The relative differences that are allowed."""

    single_gradients: float = 1e-5
    """Of a parameter's gradient in float32, compiled and not. The order of sums changes most of the
    benchmark's models by up to 3e-6, and one by 1.6e-5."""
    double: float = 1e-7
    """Of outputs and gradients in float64. Correct splits of the benchmark's models differ by at
    most 1.3e-13, and 16 blocks without normalization (``tests/worker/launch/test_conversation.py``)
    by 1.5e-8. The smallest difference of a wrong rule of joining is 3.3e-7."""
    double_rounding: float = 2.0**-9
    """The same under a plan that rounds: half of bf16's machine epsilon, so no more than rounding a
    single number. DeBERTa-v3-large in bf16 differs by up to 7e-4 on an H200: TorchScript has fused
    the logarithm of its distances in float32, and one that is rounded to an integer changes."""
    coefficient: float = 1e-3
    """Of the coefficients of the chunks' gradients in the batch's gradient, by least squares."""
    residual: float = 0.02
    """Of the batch's gradient: the part that the chunks' gradients do not explain."""
    epsilons: float = 2000.0
    """Machine epsilons of the lowest precision that an output may differ by if float64 cannot
    run."""
    coarse: float = 0.05
    """The upper limit of that difference, because in bfloat16 it would be more."""
    rounding: float = 0.25
    """Of all gradients together under a plan that rounds. bf16 has 8 significant bits: with random
    weights, tens of layers make a few per cent of them."""
    noise: float = 2.0
    """A plan that rounds may change the gradients this many times as much as rounding the weights
    to bf16 does."""
    most: float = 0.7
    """The upper limit of that difference. Gradients that are lost, or twice as large, differ by
    1."""
    factor: float = 1.8
    """The ratio of norms that a gradient may have if rounding decides its direction. Measured in
    bf16 on ResNets of 50 to 152 layers with random weights: 1.3, and with two classes 1.7."""


TOLERANCES = Tolerances()
