"""How far two ways to compute the same may differ, and what each number rests on. Imports no torch.

A split, and a plan that does not round, are judged twice. In the script's own precision only what
is clearly no more than another order of sums is accepted. Everything else is decided in float64,
where the order of sums makes next to nothing (``float64.py``). Of a plan that rounds the
gradients may differ as much as rounding the weights once makes of them. ``benchmarks/verdicts.py``
measures how often these numbers are wrong; ``docs/explanation/verification.md`` has its figures.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Relative differences that are allowed."""

    single_outputs: float = 2e-6
    """Of an output in float32, accepted at once. A rule of joining that is wrong makes as little as
    9e-6 of a loss of the zoo."""
    single_gradients: float = 1e-5
    """Of a parameter's gradient in float32, accepted at once. The order of sums makes 3e-6 of most
    of the zoo's models, and 1.6e-5 of one. A ReLU that changes sides makes 5e-4 and more."""
    double: float = 1e-7
    """Of outputs and gradients in float64. The zoo's legitimate splits make at most 1.3e-13, 16
    blocks without a norm (``tests/worker/test_conversation.py``) 1.5e-8; the smallest wrong rule of
    joining makes 3.3e-7."""
    coefficient: float = 1e-3
    """Of the coefficients of the chunks' gradients in the whole's, by least squares."""
    residual: float = 0.02
    """Of the whole's gradient: what no coefficients of the chunks' gradients explain."""
    epsilons: float = 2000.0
    """Last bits of the coarsest precision that an output may be off by where float64 cannot run."""
    coarse: float = 0.05
    """The most that these may come to: they are more than that in bfloat16."""
    rounding: float = 0.25
    """Of all gradients together, under a plan that rounds, accepted at once. bf16 keeps 8 bits: at
    random initialisation tens of layers make a few per cent of them."""
    noise: float = 2.0
    """Times what rounding the weights to bf16 once makes of the gradients that such a plan may."""
    most: float = 0.7
    """However noisy they are: gradients that are lost, or twice as large, differ by 1."""
    factor: float = 1.8
    """Times as large, or as small, that a gradient may be where its direction is chance. Seen in
    bf16 of ResNets of 50 to 152 layers at random initialisation: 1.3, and of two classes 1.7."""


TOLERANCES = Tolerances()
