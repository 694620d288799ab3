"""The pool in a Ray that somebody else has started, and opened more than once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

PROGRAM = """
import os
import shutil
import tempfile
import ray
from autofit.plan import Plan
from autofit.worker.cluster.pool import Pool
from autofit.worker.records.trials import LaunchRequest, Script
from pathlib import Path

harness = Path("harness.py")
harness.write_text("import sys; sys.exit(3)")
script = Script(target="train.py", cwd=os.getcwd())
request = LaunchRequest(script=script, plans=(Plan(),), device="cpu", budget=1, timeout=60)

def use(pool):
    pool.submit(0, request)
    while pool.free != [0]:
        for slot, event in pool.events(timeout=1):
            print(type(event).__name__)

for _ in range(2):
    with Pool(harness=harness.resolve()) as pool:
        use(pool)
assert not ray.is_initialized()
folder = tempfile.mkdtemp(dir="/tmp")  # the path of a socket must be short
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", _temp_dir=folder)
with Pool(harness=harness.resolve()) as pool:
    use(pool)
assert ray.is_initialized(), "a guest does not end its host"
ray.shutdown()
shutil.rmtree(folder)
"""


def test_a_pool_is_opened_again_and_as_a_guest(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "HOME": str(tmp_path)}  # where Ray of its own writes a token
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["TrialReport", "LaunchEnded"] * 3
