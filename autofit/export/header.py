"""What a file for another program says above its settings: where they come from, what it lacks."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

from autofit.analysis.result import Result
from autofit.printable import printable
from autofit.units import format_size
from autofit.worker.launch import rank_environment


def origin(result: Result) -> str:
    """Return the comment line that says what was measured."""
    measured = result.measurement
    devices = f"{result.ranks} x {result.hardware.name}"
    speed, peak = f"{measured.samples_per_second:.4g}", format_size(measured.peak_device)
    told = f"{result.plan}: {speed} samples/s on {devices}, peak {peak}, as autofit measured it."
    return f"# {printable(told)}"


def comments(result: Result, program: str, said: Collection[str]) -> Iterator[str]:
    """Yield comment lines: the measurement, and the levels that ``program`` has no setting for.

    ``said``: names of the strategies whose levels the settings express.
    """
    yield origin(result)
    for strategy, level in result.plan:
        if strategy.name not in said:
            summary = strategy.level(level).summary
            yield f"# Not said here, {program} has no setting for it: {strategy.name} {level}"
            yield f"#   ({summary}); see autofit best --format python."
    for name, value in result.plan.environment.items():
        yield f"# Set before Python starts: {name}={shlex.quote(value)}"


def launched_with(result: Result) -> dict[str, str]:
    """Return what the launcher set for the script, less what tells ranks of one another."""
    own = rank_environment.environment(0, 1, 0, {})
    return {name: value for name, value in result.script.environment if name not in own}
