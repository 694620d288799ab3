"""Whether one speed is known to be higher than another, and how noisy the figures are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autofit.analysis.verdicts import TIE
from autofit.worker.records.trials import Measurement

NOISY = 0.05
"""Variation from which a summary says that the figures are noisy."""


def margin(one: Measurement, other: Measurement) -> float:
    """Return the share by which two speeds must differ before one of them counts as higher.

    It is at least ``TIE``, and at least the spread of the difference: the spreads of two
    independent measurements add up as the root of their squares.
    """
    return max(TIE, math.hypot(one.spread, other.spread))


def variation(*plans: Sequence[Measurement]) -> float:
    """Return how much the figures of some plans vary, as a share.

    ``plans``: the measurements of each plan, from different processes. The result is the largest of
    two shares: by how much the steps of one measurement vary (``Measurement.variation``), and by
    how much the speeds of one plan differ (half their range, relative to its middle). A machine
    that this training has for itself shows a few percent.
    """
    steps = [each.variation for plan in plans for each in plan]
    speeds = [[each.samples_per_second for each in plan] for plan in plans]
    differ = [(max(plan) - min(plan)) / (max(plan) + min(plan)) for plan in speeds if plan]
    return max([*steps, *differ], default=0.0)


def is_faster(new: Measurement, old: Measurement) -> bool:
    """Return whether ``new`` is faster than ``old`` by more than ``margin``."""
    return new.samples_per_second > (1 + margin(new, old)) * old.samples_per_second
