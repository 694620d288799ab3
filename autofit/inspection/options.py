"""The options of ``autofit explain``, ``fit`` and ``check``, for Python and the command line.

Imports neither torch nor the strategies, so that ``autofit --help`` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autofit.flags import ValueKind, flag

if TYPE_CHECKING:
    from autofit.worker.records.trials import Script


GPU = flag(
    "Predict it for a card that is not here, such as H100; `fit` takes several, by commas.",
    ValueKind.TEXT,
    "NAME",
)
"""The option ``--gpu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """The options of ``autofit.explain``."""

    script: Script
    memory: int | None = field(
        default=None,
        metadata=flag(
            "Memory budget, such as 24GiB (default: the free memory).", ValueKind.SIZE, "SIZE"
        ),
    )
    """Bytes; ``None`` for what the device has free, less a headroom."""
    gpu: str | None = field(default=None, metadata=GPU)
    leak: bool = field(
        default=False,
        metadata=flag(
            "Follow eight steps, and name the lines that keep tensors.", ValueKind.SWITCH
        ),
    )
    snapshot: str | None = field(
        default=None,
        metadata=flag(
            "Write PyTorch's memory snapshot for memory_viz to this file (GPU only).",
            ValueKind.TEXT,
            "FILE",
        ),
    )
    storage: str = field(
        metadata=flag("Store, a file or a URL (default: ./autofit.db).", ValueKind.TEXT, "URL")
    )
    """SQLAlchemy URL of the store, whose measurements replace predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The options of ``autofit.fit``."""

    script: Script
    gpu: str | None = field(default=None, metadata=GPU)
    """Names of cards; ``None`` for all that are known."""
    memory: int | None = field(
        default=None,
        metadata=flag(
            "Memory budget, such as 24GiB (default: each card's memory less 5 %).",
            ValueKind.SIZE,
            "SIZE",
        ),
    )
    """Bytes."""
    flops: int | None = field(
        default=None,
        metadata=flag(
            "With --memory, for a card that autofit does not know: its TFLOP/s in bfloat16.",
            ValueKind.COUNT,
            "TFLOPS",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of ``autofit check``."""

    script: Script
    memory: int = field(
        metadata=flag(
            "Memory budget, such as 24GiB.",
            ValueKind.SIZE,
            "SIZE",
            required=True,
        )
    )
    """Bytes."""
    gpu: str | None = field(default=None, metadata=GPU)
    storage: str = field(
        metadata=flag("Store, a file or a URL (default: ./autofit.db).", ValueKind.TEXT, "URL")
    )
    """SQLAlchemy URL."""
