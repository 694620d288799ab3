"""The names under which a search stands in Optuna's tables, beside parameters and values.

Imports neither Optuna nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

MEMORY = "memory"
"""Constraint: excess of the peak over the budget, as a share; above zero if it does not fit."""
ALLOWED = "allowed"
"""Constraint: above zero for levels that cannot be combined, or that the script rules out."""


class Attribute(StrEnum):
    """Names of the user attributes of an Optuna study and of its trials."""

    BUDGET = "budget_bytes"
    """Of the study: bytes of a device."""
    DEVICE = "device"
    """Of the study: ``"cuda"`` or ``"cpu"``."""
    LINK = "link"
    """Of the study: how the GPUs are connected, as in ``Hardware``."""
    BANDWIDTH = "bandwidth"
    """Of the study: bytes a second between the ranks of a plan, as measured; ``None`` if not."""
    SPREADS_LATER = "spreads_later"
    """Of the study: whether the search will spread a training over several devices."""
    HORIZON = "horizon"
    """Of the study: optimizer steps over which the time to compile is charged."""
    FACTS = "facts"
    """Of the study: what is known of the script."""
    SPACE = "space"
    """Of the study: the levels that may be tried now, by strategy."""
    PARAMETERS = "parameters"
    """Of the study: the choices of each parameter. They never change."""
    CONFIRMATIONS = "confirmations"
    """Of the study: the confirmation runs. They are no trials."""
    AMENDED = "amended"
    """Of the study: reports that have changed since their trials ended, by ``RECORD``."""
    DEADLINE = "deadline"
    """Of the study: when ``--timeout`` ends the search, in seconds of ``time.time``."""
    LAUNCH = "launch"
    """Of a trial: the launch that asked for it; ``None`` for a new launch."""
    PLAN = "plan"
    """Of a trial: the levels that its plan changes."""
    RECORD = "autofit_trial"
    """Of a trial: the id of the trial in autofit's own table."""
    REPORT = "report"
    """Of a finished trial: the whole report."""


def strategy_of(parameter: str) -> str:
    """Return the strategy of a parameter: ``"compile"`` for ``"compile 2"``."""
    return parameter.partition(" ")[0]


def parameters(
    space: Sequence[tuple[str, Sequence[str]]], known: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return the parameters of a search and their choices, one for each strategy with a choice.

    Optuna requires that the choices of a parameter never change. If a strategy has a level that
    its parameter in ``known`` lacks, it gets another parameter, such as ``"compile 2"``.
    """
    found = {}
    for strategy, levels in space:
        if len(levels) < 2:
            continue
        mine = [name for name in known if strategy_of(name) == strategy]
        if mine and set(levels) <= set(known[mine[-1]]):
            found[mine[-1]] = list(known[mine[-1]])
        else:
            found[f"{strategy} {len(mine) + 1}" if mine else strategy] = list(levels)
    return found
