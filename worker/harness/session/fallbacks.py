"""The plans of a real run: its own, and those that may replace it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.plan import Plan
from autofit.strategies import Number
from autofit.strategies.support.block_levels import more_blocks

LEANER = 0.95
"""After a shortage, a fallback must have a peak below this share of the present plan's."""


class Fallbacks:
    """Plans by their position: the run's at 0, then the fallbacks, each of which is used once."""

    def __init__(self, plans: Sequence[Plan], peaks: Sequence[int]) -> None:
        """``peaks``: bytes that each plan occupied when measured; empty or 0 if not measured."""
        self.plans = [*plans]
        self._peaks = [*(peaks or (0,) * len(plans))]
        self.left = list(range(1, len(plans)))
        """Positions of the fallbacks that are left."""

    def with_more_blocks(self, now: int) -> list[int]:
        """Return the fallbacks that only checkpoint more blocks than the plan at ``now``."""
        plan, peak = self.plans[now], self._peaks[now]
        return [
            n
            for n in self.left
            if more_blocks(self.plans[n].blocks, plan.blocks)
            and self.plans[n].with_number(Number.BLOCKS, plan.blocks) == plan
            and self._peaks[n] < LEANER * peak
        ]

    def leaner(self, now: int) -> list[int]:
        """Return the fallbacks that are known to need less memory than the plan at ``now``."""
        peak = self._peaks[now]
        return [n for n in self.left if 0 < self._peaks[n] < LEANER * peak]

    def neutral(self) -> int | None:
        """Return the position of the script as it is, if the run can still change to it."""
        return next((n for n in self.left if self.plans[n].neutral and self._follows(n)), None)

    def add(self, plan: Plan) -> None:
        """Let the run fall back to ``plan`` first."""
        self.plans.append(plan)
        self._peaks.append(0)
        self.left.insert(0, len(self.plans) - 1)

    def take(self, now: int, blamed: str | None, among: Sequence[int] | None = None) -> int | None:
        """Use the next fallback, in which the ``blamed`` strategy has not the level it has now.

        ``now``: position of the present plan. ``among``: the fallbacks to choose from. Returns
        ``None`` if none is left.
        """
        plan = self.plans[now]
        for n in self.left if among is None else among:
            other = self.plans[n]
            wrong = blamed and other[blamed] == plan[blamed]
            if self._follows(n) and not wrong and other != plan:
                self.left.remove(n)
                return n
        return None

    def _follows(self, index: int) -> bool:
        return self.plans[index].follows(self.plans[0].fixed)
