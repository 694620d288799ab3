"""The pause before torch starts CUDA, with torch's own ``_lazy_init`` on a machine without CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

PROGRAM = """
import torch
from autofit.worker.harness.patching.first_device_call import before_device_starts, holds_context
from autofit.worker.harness.patching.patches import Patches

seen = []
torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_hasPrimaryContext = lambda index: "start" in seen
torch._C._cuda_init = lambda: seen.append("start")
torch.cuda._cudart, torch.cuda.device_count = object(), lambda: 1
torch.cuda._queued_calls[:] = [(lambda: seen.append("queued"), [])]


def wait():
    assert not torch.cuda.is_initialized()
    assert not holds_context()
    seen.append("wait")


before_device_starts(Patches(), wait)
assert seen == []
for _ in range(2):
    {call}
assert seen == ["wait", "start", "queued"], seen
assert torch.cuda.is_initialized()
assert holds_context()
"""


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.init()",
        "torch.cuda.memory._lazy_init()  # imported by name",
        "try: torch.empty(1, device='cuda')\n    except (RuntimeError, NotImplementedError): pass",
    ],
    ids=["python", "by_name", "from_c"],
)
def test_every_way_to_start_cuda_waits_once(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{call}", call)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
