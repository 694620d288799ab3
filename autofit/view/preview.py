"""The output of ``autofit search --dry-run``: the plans to be tried, and the expected time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.view import words

if TYPE_CHECKING:
    from autofit.tuning.preview import Preview


def lines(preview: Preview) -> list[str]:
    """Return the preview as plain text."""
    return [
        *([preview.note] if preview.note else []),
        *(f"{number:>3}  {plan}" for number, plan in enumerate(preview.plans)),
        *words.left_out(preview.left_out),
        _estimate(preview.minutes),
    ]


def as_document(preview: Preview) -> dict[str, Any]:
    """Return the preview for ``--json``; ``minutes`` is ``[least, most]`` or ``null``."""
    return {
        "plans": [plan.levels for plan in preview.plans],
        "left_out": [
            {"strategy": strategy, "level": level, "reason": reason}
            for strategy, level, reason in preview.left_out
        ],
        "note": preview.note,
        "minutes": None if preview.minutes is None else list(preview.minutes),
    }


def _estimate(minutes: tuple[float, float] | None) -> str:
    if minutes is None:
        return "no estimate of the time: autofit has not run this script yet"
    least, most = minutes
    if most < 1:
        return "less than a device minute"
    return f"about {least:.0f} to {most:.0f} device minutes"
