"""What a run writes, without the line that each first run of a plan writes."""

from __future__ import annotations


def beside_the_check(text: str) -> str:
    """Return what a run wrote, without the line that its plan is verified first."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "is verified first" not in line)


def ours(text: str) -> list[str]:
    """Return the lines of autofit's own, without that one."""
    lines = beside_the_check(text).splitlines()
    return [line for line in lines if line.startswith("autofit: ")]
