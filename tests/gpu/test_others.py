"""A card that another process uses: named by ``doctor``, respected by the default budget."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from autofit.tuning import study
from autofit.tuning.local_slots import LocalSlots
from autofit.tuning.options import SearchOptions
from autofit.worker import meter
from autofit.worker.records.trials import Script

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def test_a_process_that_holds_most_of_the_card(
    free: int, hog: Callable[[int], AbstractContextManager[int]], tmp_path: Path
) -> None:
    held = free * 7 // 10
    options = SearchOptions(
        script=Script(target="train.py", cwd=str(tmp_path)), storage="sqlite://", gpus=1
    )
    with hog(held) as pid:
        slots = LocalSlots(options)
        budget = study.budget(slots.free, slots.hardware, None, 5.0)
        assert free - held - 10 * GIB < budget < free - held
        named = any(holder.size for holder in meter.cards()[0].holders)
        line = f"process {pid} (" if named else "processes that the driver does not name here"
        assert line in slots.lines[0]
        command = [sys.executable, "-m", "autofit", "doctor"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert line in done.stdout, done.stdout + done.stderr
