"""What the cost model assumes before a trial has measured anything: every number in one record.

Widths are standard deviations of logarithms: 0.7 stands for a factor of two, 3.0 for one of twenty.
Trials override each number soon, so that wide priors cost a few trials and narrow ones may mislead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """How unsure a factor is, on a GPU and on the CPU."""

    cuda: float
    cpu: float

    def of(self, *, cuda: bool) -> float:
        """Return the width for a device."""
        return self.cuda if cuda else self.cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """Expectations of the cost model, their widths, and the noise of measurements."""

    launch: float = 0.0015
    """Seconds that a GPU's host needs to launch the kernels of a block, forward and backward."""
    cpu_launch: float = 0.01
    """The same on the CPU, as a share of the first step time that was measured."""
    blocks: int = 12
    """Blocks of a model in which none were recognised."""
    rerun: float = 0.15
    """Share of the compute that runs twice when only one chunk's graph is kept."""
    least_activations: float = 0.1
    """Share of the budget that activations fill at least, in the first guess of their slope."""
    context: Width = Width(cuda=0.7, cpu=2.0)
    slope: float = 3.0
    """Width of the bytes per sample, which only a trial can tell."""
    first_seconds: float = 3.0
    """Width of the step time after the first trial."""
    no_seconds: float = 0.01
    """Width of the step time before the first trial: all plans then share one unknown unit."""
    rerun_width: float = 1.0
    launch_width: Width = Width(cuda=0.7, cpu=1.5)
    memory_effects: float = 0.3
    """Width of a level's effect on memory, as a share of the effect."""
    time_effects: float = 0.8
    """The same on compute."""
    launch_effects: float = 2.0
    """The same on the time that launches take."""
    bandwidth_width: float = 0.7
    """Width of the assumed bytes a second between ranks, of which computation may hide a part."""
    attained: float = 0.5
    """Share of the measured bandwidth that a training attains: it also copies, waits and meets.

    A decoder of 1.1 B parameters on two H200s attains 98 GB/s (``benchmarks/results/cards.md``).
    """
    attained_width: float = 0.4
    """Width of that share. It is narrower, because the link itself is known."""
    least_effect: float = 0.05
    """Width of an effect that is expected to be none."""
    no_effect: float = 0.001
    """Width of the effect on compute of a level that launches the same kernels in another way."""
    low_precision: Width = Width(cuda=0.05, cpu=3.0)
    """The same for the effect of lower precision on compute. Some CPUs only emulate bf16, and need
    ten times as long as for float32 (``examples/char_lm.py`` on an EPYC)."""
    alike: float = 0.8
    """Correlation of the errors of two levels of one strategy."""
    deviation: float = 0.04
    """Deviation of a plan from the structure, as a share, while few plans were measured."""
    noise: float = 0.03
    """Error of a step time or a peak at one size, as a share: what a line through sizes leaves."""
    short_noise: float = 0.09
    """The same for a window of two steps or fewer."""
    strained_noise: float = 1.0
    """The same for a step time of a plan that barely fits (``Measurement.strained``)."""


PRIORS = Priors()
"""The priors in use."""
