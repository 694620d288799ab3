"""How two real cards are joined: NVML's answer is that of ``nvidia-smi topo``."""

from __future__ import annotations

import re
import subprocess

import pytest

from autofit.worker import meter

pytestmark = pytest.mark.gpu


def test_the_link_is_what_nvidia_smi_draws() -> None:
    """``NV18`` and the like between two cards is NVLink; all else goes over PCIe."""
    cards = meter.cards()
    if len(cards) < 2 or any(card.mig for card in cards):
        pytest.skip(f"needs two whole NVIDIA GPUs; {len(cards)} are visible")
    drawn = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True)
    plain = re.sub(r"\x1b\[[\d;]*m", "", drawn.stdout)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    between = {int(row[0][3:]): row[1 : 1 + len(rows)] for row in rows}
    shown = [int(card.entry) for card in cards]
    for card, number in zip(cards, shown, strict=True):
        to_others = [between[number][other] for other in shown if other != number]
        linked = all(each.startswith("NV") for each in to_others)
        assert card.hardware.link == ("nvlink" if linked else "pcie"), to_others
