"""The names under which a search stands in Optuna's tables, beside parameters and values.

Imports neither Optuna nor torch.
"""

from __future__ import annotations

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
    HORIZON = "horizon"
    """Of the study: optimizer steps over which the time to compile is charged."""
    FACTS = "facts"
    """Of the study: what is known of the script."""
    SPACE = "space"
    """Of the study: the levels that may be tried now, by strategy."""
    CONFIRMATIONS = "confirmations"
    """Of the study: the confirmation runs. They are no trials."""
    FIRST = "first_in_process"
    """Of the study: plans that must be the first of a process."""
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
