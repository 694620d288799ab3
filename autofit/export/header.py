"""What exported files say of their origin, and how the script was launched."""

from __future__ import annotations

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


def launched_with(result: Result) -> dict[str, str]:
    """Return the variables that the launcher set for the script, without those of a rank."""
    own = rank_environment.environment(0, 1, 0, {})
    return {name: value for name, value in result.script.environment if name not in own}
