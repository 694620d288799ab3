"""Every function of ``torch.accelerator`` that is called exists in the torch that is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.quick


def test_what_is_called_of_torchs_accelerator_exists(root: Path) -> None:
    """It grows with each release; run this on an older one, as on the machine with the GPUs."""
    sources = [
        path for name in ("autofit", "strategies", "worker") for path in (root / name).rglob("*.py")
    ]
    text = "".join(path.read_text() for path in sources)
    called = set(re.findall(r"torch\.accelerator\.(\w+)\(", text))
    assert {"current_accelerator", "synchronize"} <= called
    assert [name for name in called if not hasattr(torch.accelerator, name)] == []
