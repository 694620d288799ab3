"""Which cards each slot is shown. No card is needed for that: the children only look."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autofit.exceptions import WorkerError
from autofit.plan import Plan
from autofit.worker.cluster.local_ray import AUTH_MODE
from autofit.worker.cluster.pool import Pool
from autofit.worker.records.trials import LaunchRequest, Learned, Script

HARNESS = """
import os
from multiprocessing.connection import Connection
from autofit.strategies import Facts
from autofit.worker.records.trials import *

events = Connection(int(os.environ["AUTOFIT_EVENTS_FD"]), readable=False)
Connection(int(os.environ["AUTOFIT_CONTROL_FD"]), writable=False).recv()
events.send(Learned(facts=Facts(framework=os.environ["CUDA_VISIBLE_DEVICES"])))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, {0: "3", 1: "1"}), (2, {0: "3,MIG-a", 1: "1,0"})]
)
def test_each_slot_sees_its_own(tmp_path: Path, ranks: int, expected: dict[int, str]) -> None:
    """A single process sees the first card only, so that it does not use them all."""
    harness = tmp_path / "harness.py"
    harness.write_text(HARNESS)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(),),
        device="cuda",
        budget=1 << 30,
        timeout=60,
        ranks=ranks,
    )
    cards = ["3", "MIG-a", "1", "0"]
    seen: dict[int, str | None] = {}
    with Pool(slots=2, device="cuda", gpus=2, cards=cards, harness=harness) as pool:
        pool.open()
        assert pool.labels == {0: "GPU 3,MIG-a", 1: "GPU 1,0"}
        for slot in pool.slots:
            pool.submit(slot, request)
        while len(pool.free) < 2:
            for slot, event in pool.events(timeout=30):
                if isinstance(event, Learned):
                    seen[slot] = event.facts.framework
    assert seen == expected


@pytest.mark.full
def test_more_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTH_MODE, raising=False)
    asked = Pool(slots=2, device="cuda", gpus=2, cards=["0", "1", "2"])
    with pytest.raises(WorkerError, match="4 GPUs are needed, 3 are visible"), asked:
        asked.open()
    assert AUTH_MODE not in os.environ, "a Ray of the program's own needs no token later"
