"""Meters and hardware: what parent and child see, and what a CPU needs for a cap."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from autofit import host
from autofit.cli import main
from autofit.exceptions import UsageError
from autofit.worker import meter
from autofit.worker.meter import build

pytestmark = pytest.mark.quick


def test_the_machine_is_described() -> None:
    found = meter.hardware("cpu")
    assert found.device == "cpu"
    assert found.name
    assert 0 < meter.free_bytes("cpu") <= found.total_bytes
    assert found.capability is None


@pytest.mark.parametrize("call", [meter.hardware, meter.free_bytes, meter.for_device])
def test_an_unknown_device_is_named(call: object) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match="there is no device 'tpu': write cpu or cuda"):
        call("tpu")


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (
            "0::/job/7\n",
            {
                "cgroup.controllers": "memory",
                "job/7/memory.max": "max",
                "job/memory.max": "4096",
                "job/memory.current": "1024",
                "job/memory.stat": "anon 512\ninactive_file 24",
            },
        ),
        (
            "3:cpu:/job\n2:memory:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "4096",
                "memory/job/memory.usage_in_bytes": "1024",
                "memory/job/memory.stat": "inactive_file 5\ntotal_inactive_file 24",
            },
        ),
        (  # a container of version 1, which sees its own group as the tree
            "2:memory:/docker/0123\n",
            {"memory/memory.limit_in_bytes": "4096", "memory/memory.usage_in_bytes": "1000"},
        ),
    ],
)
def test_a_containers_limit_counts(
    own: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_CGROUP", tmp_path / "own")
    assert meter.hardware("cpu").total_bytes == 4096
    assert meter.free_bytes("cpu") == 4096 - 1000


def test_the_parent_needs_neither_torch_nor_a_driver() -> None:
    program = (
        "import sys; from autofit.worker import meter, oom;"
        "meter.hardware('cpu'); meter.default_device(); meter.environment('cpu', 1);"
        "assert not {'torch', 'ray', 'optuna', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_environment_adds_to_the_one_given_and_can_be_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user = {"LD_PRELOAD": "mine.so", "MALLOC_MMAP_THRESHOLD_": "1", "HOME": "/"}
    ours = meter.environment("cpu", 4096, user)
    if build.shim() is not None:
        assert ours["LD_PRELOAD"] == f"{build.shim()}:mine.so"
    assert "HOME" not in ours
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in (user | ours).items():
        monkeypatch.setenv(name, value)
    meter.forget()
    assert dict(os.environ) == user
    meter.forget()  # nothing left to do
    assert dict(os.environ) == user


# --- without a compiler -----------------------------------------------------------------------


def test_a_process_without_the_shim_is_read_and_not_capped() -> None:
    program = """
        import torch
        from autofit.worker import meter as meters
        meter = meters.for_device("cpu")
        assert type(meter).__name__ == "ResidentMeter", meter
        meter.arm()
        assert meter.capacity is None and not meter.short()
        for size in (20_000_000, 80_000_000, 40_000_000):
            meter.reset()
            x = torch.ones(size // 4)
            del x
            assert abs(meter.peak().allocated - size) < 4_000_000, (size, meter.peak())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    thresholds = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = os.environ | thresholds
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"


def test_without_a_compiler_a_search_on_the_cpu_says_so_and_exits_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "plan.json").write_text('{"plan": {}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meter, "default_device", lambda: "cpu")
    monkeypatch.setattr(build, "shim", lambda: None)
    assert main(["search", "train.py"]) == 2
    assert "needs Linux and a C compiler" in capsys.readouterr().err
    assert main(["run", "train.py", "--memory", "1GiB", "--plan", "plan.json"]) == 2
    assert "install gcc or clang" in capsys.readouterr().err
    assert meter.environment("cpu", None, {})["AUTOFIT_METER_CAP"] == "0"
