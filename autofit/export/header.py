"""Makes the comments at the top of exported files: origin, and levels that are not expressed."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

from autofit.analysis.result import Result
from autofit.printable import printable
from autofit.units import format_size
from autofit.worker.launch import rank_environment


def origin(result: Result) -> str:
    """Return the comment line with the plan and its measurement."""
    measured = result.measurement
    devices = f"{result.devices} x {result.hardware.name}"
    speed, peak = f"{measured.samples_per_second:.4g}", format_size(measured.peak_device)
    line = f"{result.plan}: {speed} samples/s on {devices}, peak {peak}, as autofit measured it."
    return f"# {printable(line)}"


def comments(result: Result, program: str, expressed: Collection[str]) -> Iterator[str]:
    """Yield comment lines: the measurement, and the levels for which ``program`` has no setting.

    ``expressed``: names of the strategies whose levels the settings express.
    """
    yield origin(result)
    for strategy, level in result.plan:
        if strategy.name not in expressed:
            summary = strategy.level(level).summary
            yield f"# Left out, because {program} has no setting for it: {strategy.name} {level}"
            yield f"#   ({summary}); see autofit best --format python."
    for name, value in result.plan.environment.items():
        yield f"# Set before Python starts: {name}={shlex.quote(value)}"


def launched_with(result: Result) -> dict[str, str]:
    """Return the variables that the launcher set for the script, without those of a rank."""
    own = rank_environment.environment(0, 1, 0, {})
    return {name: value for name, value in result.script.environment if name not in own}
