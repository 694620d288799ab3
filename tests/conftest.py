"""Shared by all tests: the tiers, and a copy of the repository to work on."""

import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from autofit.storage import TrialRecord
    from autofit.worker.records.trials import Measurement, TrialReport
    from tests.roots import Rooted

# Idle OpenMP threads wait by spinning, and most tests train something tiny in a process of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TIERS = ("quick", "full", "gpu")
NOT_SOURCE = (
    ".git",
    ".venv",
    ".demo",
    ".*_cache",
    "__pycache__",
    "build",
    "dist",
    "*.egg-info",
    "autofit.db*",
)


@cache
def _gpu_seen() -> bool:
    """Whether the driver lists a GPU; asks without importing torch."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except OSError:
        return False


@cache
def _slow() -> frozenset[str]:
    """Return the tests that ``slow.txt`` moves to the full tier."""
    lines = Path(__file__).with_name("slow.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test in no tier; mark what is slow as full; skip what needs a GPU without one.

    What needs one goes first: what follows is shown none, and CUDA looks but once a process.
    """
    items.sort(key=lambda item: item.get_closest_marker("gpu") is None)
    homeless = [i.nodeid for i in items if not any(i.get_closest_marker(tier) for tier in TIERS)]
    if homeless:
        raise pytest.UsageError(
            f"mark each test as one of {', '.join(TIERS)}; not marked: {', '.join(homeless)}"
        )
    slow = _slow()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.full)
        if item.get_closest_marker("gpu") and not _gpu_seen():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; nvidia-smi lists none"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Show GPUs to the tests that are marked for them: the others cap and measure the CPU."""
    if not item.get_closest_marker("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_set_aside() -> None:
    """Recovery collects garbage, which takes as long as there are objects: leave it few to see."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def rooted() -> "Iterator[Rooted]":
    """Makes the harness's roots of modules, which are left as they were."""
    from tests.roots import Rooted

    made = Rooted()
    yield made
    made.take_back()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[], str]]:
    """Return what makes an empty database in a real PostgreSQL, and returns its URL."""
    from tests.postgresql import server

    with server() as running:
        yield running


@pytest.fixture
def repository_copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the repository's sources, links kept, for a test to change."""
    ignore = shutil.ignore_patterns(*NOT_SOURCE)
    return shutil.copytree(root, tmp_path / "repository", symlinks=True, ignore=ignore)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster without nodes yet, on loopback: ``tests.ray_cluster.RayCluster``."""
    from tests.ray_cluster import RayCluster

    with pytest.MonkeyPatch.context() as patch, RayCluster() as cluster:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # whoever joins has to be told
        yield cluster


@pytest.fixture(scope="module")
def ray_host() -> Iterator[None]:
    """A Ray in which several searches of this process are guests: each is seconds shorter."""
    from autofit.worker.cluster import local_ray

    start = local_ray.start_head

    def with_room(folder: Path, **options: Any) -> object:
        return start(folder, **{**options, "resources": ["--num-cpus=3", "--num-gpus=0"]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ray, "start_head", with_room)
        with local_ray.RaySession():
            yield


@pytest.fixture
def measurement() -> "Callable[..., Measurement]":
    """Return what makes a measurement of some micro-batch size, step time and peak."""
    from autofit.worker.records.trials import Measurement

    def make(
        micro_batch: int = 8, seconds: float = 1.0, peak: int = 100, steps: int = 5
    ) -> "Measurement":
        return Measurement(
            micro_batch=micro_batch,
            effective_batch=8,
            step_seconds=(seconds,) * steps,
            peak_allocated=peak,
            peak_reserved=peak,
            peak_device=peak,
        )

    return make


@pytest.fixture
def finished() -> "Callable[[TrialReport], TrialRecord]":
    """Return what makes a finished trial of its report, as the store keeps it."""
    from autofit.storage import Owner, Purpose, State, TrialRecord

    def make(report: "TrialReport") -> TrialRecord:
        return TrialRecord(
            id=1,
            study="study",
            number=0,
            purpose=Purpose.SEARCH,
            state=State.FINISHED,
            plan=report.plan,
            launch=0,
            owner=Owner.current(),
            budget=1,
            versions={},
            created=datetime.now(UTC),
            report=report,
        )

    return make
