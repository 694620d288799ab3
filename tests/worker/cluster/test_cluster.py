"""Slots on machines of a cluster: where they are, what travels there, what is left of them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from autofit.exceptions import UsageError, WorkerError
from autofit.plan import Plan
from autofit.tuning.cluster_slots import open_slots
from autofit.tuning.local_slots import LocalSlots
from autofit.tuning.options import SearchOptions
from autofit.worker.cluster.actor import Found, in_copied_folder
from autofit.worker.cluster.archive import identity, is_seen
from autofit.worker.cluster.cluster_pool import ClusterPool
from autofit.worker.cluster.local_ray import RaySession
from autofit.worker.cluster.nodes import ClusterNode, choose, look, more
from autofit.worker.cluster.versions import DRIVER, obstacles, remarks
from autofit.worker.records.trials import LaunchEnded, LaunchRequest, Script

PARTS = ("autofit", "strategies", "worker", "storage")


def node(name: str, *, gpus: int = 0, model: str = "", cpus: int = 1) -> ClusterNode:
    return ClusterNode(
        id=name, host=name, address="10.0.0.1", cpus=cpus, gpus=gpus, model=model, here=False
    )


# --- where ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_without_gpus_every_machine_that_has_a_cpu_to_give_runs_one_trial() -> None:
    places = choose([node("a"), node("b", cpus=64), node("head", cpus=0)], None, 1)
    assert (places.device, places.slots, places.lines) == ("cpu", {"a": 1, "b": 1}, ())
    assert more(places, [node("c"), node("d", cpus=0)], 1, None) == {"c": 1}
    with pytest.raises(UsageError, match="--gpus 4: the cluster has no GPU"):
        choose([node("a")], 4, 1)
    with pytest.raises(UsageError, match="Ray has no CPU on any node"):
        choose([node("head", cpus=0)], None, 1)


@pytest.mark.quick
def test_of_a_mixed_cluster_the_most_of_one_model_is_used() -> None:
    cluster = [
        node("a", gpus=8, model="H100"),
        node("b", gpus=4, model="A100"),
        node("c", gpus=2, model="H100"),
        node("head"),
    ]
    places = choose(cluster, None, 1)
    assert (places.device, places.model, places.slots) == ("cuda", "H100", {"a": 8, "c": 2})
    assert places.lines == (
        "10 x H100 are used, the most of one model; 4 x A100 on b are left out",
    )
    assert choose(cluster, 9, 1).slots == {"a": 8, "c": 1}
    assert choose(cluster, None, 4).slots == {"a": 2}
    new = [node("d", gpus=8, model="H100"), node("e", gpus=8, model="A100")]
    assert more(places, new, 1, None) == {"d": 8}
    assert more(places, new, 1, 3) == {"d": 3}
    assert more(places, new, 1, 0) == {}


@pytest.mark.quick
def test_a_trial_runs_on_one_host() -> None:
    cluster = [node("a", gpus=3, model="H100"), node("b", gpus=3, model="H100")]
    places = choose(cluster, 6, 2)
    assert places.slots == {"a": 1, "b": 1}
    assert places.lines == (
        "--gpus 6 --gpus-per-trial 2: a trial runs on one host; the hosts can run 2 at a time",
    )
    with pytest.raises(UsageError, match=r"--gpus-per-trial 4: .* none .* more than 3 GPUs; ask"):
        choose(cluster, None, 4)
    with pytest.raises(UsageError, match="--gpus 7: the cluster has 6 x H100; ask for fewer"):
        choose(cluster, 7, 1)


@pytest.mark.quick
def test_what_versions_have_to_agree_in() -> None:
    here = {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.1"}
    same = {"python": "3.11.9", "torch": "2.13.0+cu128", DRIVER: "570.1"}
    assert obstacles(same, here, builds=False) == []
    assert obstacles(same, {**same, "torch": "2.13.0+cu126"}, builds=True, at="on b") == [
        "torch 2.13.0+cu128 there, 2.13.0+cu126 on b"
    ]
    other = {"python": "3.12.1", "transformers": "5.2", DRIVER: "570.1"}
    assert obstacles(other, here, builds=False) == [
        "python 3.12.1 there, 3.11.7 here",
        "torch is not installed there, 2.13.0+cpu here",
    ]
    assert remarks(other, here) == ["transformers 5.2 there, 5.1 here"]


# --- what travels -----------------------------------------------------------------------------


@pytest.mark.quick
def test_a_copy_of_a_folder_is_told_from_the_folder(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "train.py").write_text("pass")
    assert identity(str(one)) == identity(str(one)) != identity(str(other))
    seen = identity(str(one))
    (one / "autofit.db-wal").write_text("a store that is in use")
    assert identity(str(one)) == seen
    assert identity(str(tmp_path / "none")) is None


@pytest.mark.quick
def test_a_folder_stays_the_same_while_a_log_is_written_into_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "train.py").write_text("pass")
        (folder / "search.log").touch()
    before = identity(str(one))
    (one / "search.log").write_text("a line\n")
    there = identity(str(one))
    (one / "search.log").write_text("another line\n")
    (one / "new").touch()
    now = identity(str(one))
    assert is_seen(there, before, now)
    assert not is_seen(identity(str(other)), before, now)
    assert not is_seen(identity(str(tmp_path / "none")), before, now)
    (one / "train.py").write_text("nothing has stayed")
    (one / "search.log").write_text("nor here")
    assert is_seen(identity(str(one)), before, identity(str(one)))
    assert not is_seen(identity(str(other)), before, identity(str(one)))


@pytest.mark.quick
def test_a_script_moves_with_its_folder() -> None:
    def target(given: str, module: bool = False) -> str:
        script = Script(target=given, module=module, cwd="/home/me")
        script = in_copied_folder(script, "/home/me", "/tmp/copy")
        assert script.cwd == "/tmp/copy"
        return script.target

    assert target("sub/train.py") == "sub/train.py"
    assert target("/home/me/sub/train.py") == "/tmp/copy/sub/train.py"
    assert target("package.train", module=True) == "package.train"
    for outside in ("/elsewhere/train.py", "../train.py"):
        with pytest.raises(UsageError, match="is outside the working directory /home/me"):
            target(outside)


# --- a cluster of several machines --------------------------------------------------------------


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary folder of the cluster's nodes."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose script needs what lies beside it."""
    (tmp_path / "train.py").write_text(
        "import beside, os\n"
        "print(beside.WORD, os.getcwd(), *map(os.environ.get, ['OF_THE_USER', 'OF_BOTH']))\n"
    )
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    return tmp_path


@pytest.fixture
def far(temporary: Path, ray_cluster: Any, folder: Path, root: Path) -> Iterator[str]:
    """A machine of another name, which has neither the working directory nor autofit."""
    from tests.ray_cluster import far as started

    ray_cluster.add()
    with started(ray_cluster, [folder, *(root / part for part in PARTS)]) as name:
        yield name


@pytest.mark.full
def test_code_and_folder_travel_to_a_machine_that_does_not_have_them(
    ray_cluster: Any,
    far: str,
    folder: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_BOTH", "the user's")
    monkeypatch.setenv("OF_THE_USER", "the user's own")
    script = Script(target=str(folder / "train.py"), cwd=str(folder))
    with ClusterPool(ray_cluster.address, script) as pool:
        pool.open()
        deadline = time.monotonic() + 60
        while far not in {each.host for each in look().values()}:
            assert time.monotonic() < deadline, "the machine did not join"
            time.sleep(0.5)
        pool.settle("cpu", 1)
        machines = {each.host: each for each in look().values()}
        assert {host: each.here for host, each in machines.items()} == {
            far: False,
            socket.gethostname(): True,
        }
        for each in machines.values():
            pool.add(each, 1)
        found: dict[int, Found] = {}
        while pool.coming:
            assert time.monotonic() < deadline + 60, "the workers did not come"
            for slot, arrived in pool.arrivals(5):
                assert isinstance(arrived, Found), arrived
                found[slot] = arrived
        assert sorted(each.host for each in found.values()) == sorted(machines)
        (there,) = (slot for slot, each in found.items() if each.host == far)
        (here,) = set(pool.slots) - {there}
        assert run(pool, here, script) == f"found {folder} the user's own the user's"
        word, where, *users = run(pool, there, script).split(maxsplit=2)
        assert word == "found"
        assert "working_dir_files" in where, "a copy, where Ray keeps them"
        assert users == ["the user's own the node's"]
    deadline = time.monotonic() + 30
    while left := [*temporary.glob("autofit-*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.full
def test_trials_side_by_side_on_a_machine_share_its_cores(
    ray_cluster: Any, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "train.py").write_text("import os\nprint(os.environ.get('OMP_NUM_THREADS'))\n")
    script = Script(target="train.py", cwd=str(tmp_path))
    ray_cluster.add("CPU=2")
    cores = len(os.sched_getaffinity(0))
    for count, expected in ((2, str(max(1, cores // 2))), (1, "None")):
        with ClusterPool(ray_cluster.address, script) as pool:
            pool.open()
            pool.settle("cpu", 1)
            pool.add(max(look().values(), key=lambda each: each.cpus), count)
            while pool.coming:
                assert all(isinstance(each, Found) for _, each in pool.arrivals(60))
            assert run(pool, pool.slots[0], script).strip() == expected


def run(pool: ClusterPool, slot: int, script: Script) -> str:
    """Run a script that takes no step; return what it printed."""
    request = LaunchRequest(
        script=script, plans=(Plan(),), device="cpu", budget=1 << 30, timeout=60
    )
    pool.submit(slot, request)
    deadline = time.monotonic() + 70
    while time.monotonic() < deadline:
        for _, event in pool.events(timeout=5):
            if isinstance(event, LaunchEnded):
                return event.output
            assert not isinstance(event, WorkerError), event
    raise AssertionError("the launch did not end")


@pytest.mark.quick
def test_a_cluster_that_is_not_there_is_said_at_once() -> None:
    started = time.monotonic()
    where = "Ray at 127.0.0.1:1 cannot be used: .*Connection refused"
    with pytest.raises(WorkerError, match=where), RaySession(address="127.0.0.1:1"):
        pass
    outside = "--address ray://head:10001: give auto or host:port, on a machine of the cluster"
    with pytest.raises(UsageError, match=outside), RaySession(address="ray://head:10001"):
        pass
    assert time.monotonic() - started < 5


@pytest.mark.quick
def test_what_is_not_ray_is_said_soon() -> None:
    """Nothing of Ray's stays in this process: its client ends the process when it gives up."""
    started, threads = time.monotonic(), _threads()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        where = f"Ray at {address} cannot be used: the server there is no head of Ray"
        with pytest.raises(WorkerError, match=where), RaySession(address=address):
            pass
    assert time.monotonic() - started < 10
    assert _threads() <= threads


def _threads() -> int:
    """Count the threads of this process, Python's or not."""
    return len(os.listdir("/proc/self/task"))


def options(cluster: Any, folder: Path, **more: Any) -> SearchOptions:
    script = Script(target="train.py", cwd=str(folder))
    return SearchOptions(script=script, storage="", address=cluster.address, **more)


@pytest.mark.full
def test_machines_join_and_are_gone(ray_cluster: Any, temporary: Path, folder: Path) -> None:
    ray_cluster.add()  # this process joins the cluster here
    raylet = ray_cluster.add()
    said: list[str] = []
    with ExitStack() as stack:
        slots = open_slots(options(ray_cluster, folder), stack)
        before = slots.count
        assert slots.idle([]) == [*range(before)]
        ray_cluster.add()
        update(slots, lambda: len(slots.idle([])) == before + 1, said)
        assert said == [f"{socket.gethostname()} has joined the search"]
        os.kill(raylet, signal.SIGKILL)
        update(slots, lambda: len(slots.idle([])) == before, said)
        assert said[1:] == [
            f"{socket.gethostname()} is gone from the cluster. The search does not use it any more."
        ]
        assert slots.handle_end(
            slots.idle([])[0], ended(lost="GPU 0 has 1.0 GiB free"), said.append
        )
        assert len(slots.idle([])) == before - 1


@pytest.mark.full
def test_a_machine_that_cannot_be_used_gives_its_gpus_back(
    ray_cluster: Any, temporary: Path, folder: Path
) -> None:
    ray_cluster.add()
    ray_cluster.add("GPU=3")  # as Ray was told: there is no driver
    why = "no machine of the cluster can be used: .* cannot be used: the NVIDIA driver does not"
    with pytest.raises(WorkerError, match=why), ExitStack() as stack:
        open_slots(options(ray_cluster, folder, gpus_per_trial=2), stack)
    with pytest.raises(UsageError, match="none of the cluster's has more than 3"), ExitStack() as s:
        open_slots(options(ray_cluster, folder, gpus_per_trial=4), s)
    with RaySession(address=ray_cluster.address):
        from ray.util import placement_group_table

        table: Any = placement_group_table
        deadline = time.monotonic() + 30
        while {group["state"] for group in table().values()} != {"REMOVED"}:
            assert time.monotonic() < deadline, table()
            time.sleep(0.2)


def update(slots: LocalSlots, done: Callable[[], bool], said: list[str]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, said
        slots.update(said.append, idle=False)
        time.sleep(0.2)


def ended(lost: str) -> LaunchEnded:
    return LaunchEnded(steps=0, stopped=False, seconds=1.0, lost=lost)
