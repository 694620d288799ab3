"""Leases, and what is left when the process that searches is killed at any moment."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.storage import Owner, State, Store, StudyKey, StudyRecord
from autofit.storage import store as store_module
from autofit.worker.records.trials import TrialReport

pytestmark = pytest.mark.quick

Open = Callable[..., StudyRecord]
Report = Callable[..., TrialReport]

SEARCH = """
import sys, time
from autofit.plan import Plan
from autofit.storage import Owner, Store, StudyKey
from autofit.strategies import Hardware
from autofit.worker.records.trials import Measurement, Script, TrialReport, Verdict

storage, cwd, wait = sys.argv[1:]
script = Script(target="train.py", args=("--epochs", "3"), cwd=cwd)
store = Store(storage)
study = store.open_study(
    StudyKey.of(script, gpu="NVIDIA H200", gpus=1, memory=24 << 30, allow="rounding"),
    script=script, hardware=Hardware(device="cuda", name="NVIDIA H200", total_bytes=1),
    budget=1, versions={},
)
store.reclaim(study)
done = {trial.plan for trial in store.trials(study) if trial.report}
measurement = Measurement(
    micro_batch=1, effective_batch=1, step_seconds=(1.0,), peak_allocated=1, peak_reserved=1,
    peak_device=1,
)
left = [p for n in range(1, 2000) if (p := Plan.of({"micro_batch": str(n)})) not in done]
for pair in zip(left[::2], left[1::2]):
    trials = store.add_trials(study, pair, launch=store.next_launch(study), owner=Owner.current())
    for trial in trials:
        print("running", trial.number, flush=True)
        if wait == "wait":
            time.sleep(600)
        report = TrialReport(index=0, plan=trial.plan, verdict=Verdict.MEASURED,
                             measurements=(measurement,) * 3)
        store.finish(trial, report)
        print("finished", trial.number, flush=True)
"""


@pytest.fixture
def search(location: str, key: StudyKey) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a process that searches the study of ``key``, without end or stuck in a trial."""
    started = []

    def start(*, wait: bool = False) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", SEARCH, location, str(Path(key.script).parent)]
        command.append("wait" if wait else "go")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_no_finished_trial_is_lost_when_the_search_is_killed(
    location: str, opening: Open, search: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """Five searches of one study, each killed at a random moment once it runs."""
    moment = random.Random(0)
    claimed: set[int] = set()
    for _ in range(5):
        process = search()
        said = [line(process)]
        time.sleep(moment.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        said += process.stdout.read().split("\n")
        process.wait()
        claimed |= {int(each.split()[1]) for each in said if each.startswith("finished ")}
        with Store(location) as store:
            study = opening(store)
            assert store.holder(study) is None
            running = store.trials(study, state=State.RUNNING)
            assert len(running) <= 2
            assert store.reclaim(study) == len(running)
            finished = store.trials(study, state=State.FINISHED)
    assert claimed
    assert claimed <= {trial.number for trial in finished}
    assert len({trial.plan for trial in finished}) == len(finished)
    assert all(trial.report and len(trial.report.measurements) == 3 for trial in finished)


def test_a_live_search_is_the_holder_and_keeps_its_trials(
    store: Store, opening: Open, search: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = search(wait=True)
    assert line(process) == "running 0"
    study = opening(store)
    assert study.budget == 1, "who is not the holder changes nothing"
    holder = store.holder(study)
    assert holder is not None
    assert holder.pid == process.pid
    assert store.reclaim(study) == 0
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie stays
    assert store.holder(study) is None
    assert store.reclaim(study) == 2
    assert [trial.state for trial in store.trials(study)] == [State.INTERRUPTED] * 2
    assert opening(store).budget == 24 << 30


def test_one_process_is_no_holder_to_itself_and_lets_go_at_the_end(
    location: str, opening: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(location) as first, Store(location) as second:
        study = opening(first)
        assert first.holder(study) is second.holder(study) is None
        me = Owner.current()
        monkeypatch.setattr(Owner, "current", lambda: dataclasses.replace(me, pid=os.getppid()))
        assert second.holder(study) == me
        monkeypatch.undo()
        first.close()
        monkeypatch.setattr(Owner, "current", lambda: dataclasses.replace(me, pid=os.getppid()))
        assert second.holder(study) is None


def test_on_another_host_the_lease_decides(
    store: Store, study: StudyRecord, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = dataclasses.replace(Owner.current(), host="elsewhere.invalid")
    assert away.alive() is None
    store.add_trials(study, [plan], launch=0, owner=away)
    start = datetime.now(UTC)

    def clock(seconds: float) -> None:
        now = start + seconds * store_module.LEASE / 60
        monkeypatch.setattr(store_module, "_now", lambda: now)

    clock(50)
    assert store.holder(study) == away
    store.heartbeat(away)
    clock(100)
    assert store.reclaim(study) == 0
    clock(111)
    assert store.holder(study) is None
    assert store.reclaim(study) == 1


def test_on_this_host_a_late_heartbeat_costs_nothing(
    store: Store, study: StudyRecord, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended laptop: the process lives, its lease is long over."""
    store.add_trials(study, [plan], launch=0, owner=Owner.current())
    later = datetime.now(UTC) + 100 * store_module.LEASE
    monkeypatch.setattr(store_module, "_now", lambda: later)
    assert store.reclaim(study) == 0


def test_a_reused_process_number_is_another_process(
    store: Store, study: StudyRecord, plan: Plan
) -> None:
    me = Owner.current()
    assert me.alive()
    earlier = dataclasses.replace(me, started=me.started - 60)
    assert earlier.alive() is False
    assert not earlier.same(me)
    store.add_trials(study, [plan], launch=0, owner=earlier)
    assert store.reclaim(study) == 1
