"""The commands of the pages about a Ray cluster run as printed, on a real head.

The test has a network of its own, in which this machine has the addresses of the pages' machines.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.storage import Store
from autofit.worker.launch.reaper import SESSION, Reaper
from tests.docs.blocks import blocks_of
from tests.docs.conftest import DATABASE, SCRIPT
from tests.docs.test_commands import ON_A_HEAD
from tests.postgresql import PASSWORD, USER, server
from tests.ray_head import TOOLS, needs_a_job_server

DISTRIBUTED = """
import torch
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(32, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.distributed.barrier()  # else gloo may stop or abort the process at its end
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with a home of its own, whose Ray ends with the test."""
    needs_a_job_server()
    home = Path(tempfile.mkdtemp(prefix="docs-", dir="/tmp"))  # short: Ray's sockets are in it
    mark = uuid.uuid4().hex
    reaper = Reaper(mark, home)
    yield {
        **os.environ,
        SESSION: mark,
        "SPT_NOENV": "1",  # else the mark is overwritten
        "HOME": str(home),
        "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
        "RAY_TMPDIR": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    reaper.finish()
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("network")
def test_the_commands_run(session: dict[str, str], root: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train_ddp.py").write_text(DISTRIBUTED)
    lines = "".join(
        block.commands for page in ON_A_HEAD for block in blocks_of(root / page) if not block.reason
    )
    with server(DATABASE, 5432) as postgresql:
        store = postgresql(USER)
        ran = subprocess.run(
            ["bash", "-euxc", lines],
            cwd=tmp_path,
            env={**session, "PGPASSWORD": PASSWORD},
            capture_output=True,
            text=True,
            timeout=850,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        with Store(store) as kept:
            (study,) = kept.studies()
    assert study.key.script == str(tmp_path / "train.py")
    assert len(re.findall(r"^[\d.]+ (±[\d.]+ )?samples/s in ", ran.stdout, re.MULTILINE)) == 5
