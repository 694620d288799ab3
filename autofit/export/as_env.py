"""Writes environment variables: the plan, and those that it needs before the process starts."""

from __future__ import annotations

import shlex

from autofit.analysis.result import Result


def render(result: Result) -> str:
    """Return ``KEY=VALUE`` lines, quoted for a shell: ``set -a; . FILE; set +a``."""
    variables = {
        "AUTOFIT_PLAN": ",".join(f"{name}={level}" for name, level in result.plan.changes),
        **result.plan.environment,
    }
    return "".join(f"{key}={shlex.quote(value)}\n" for key, value in variables.items())
