"""A launch of several ranks, as real processes: one truth of them all, whichever way they go."""

from __future__ import annotations

import os
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from autofit.exceptions import WorkerError
from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker import meter
from autofit.worker.harness.measurement.window import Step, Window
from autofit.worker.harness.parent.agreement import Figures
from autofit.worker.launch import environment as environments
from autofit.worker.launch.environment import launched
from autofit.worker.launch.group import REPORT_SECONDS
from autofit.worker.launch.launcher import Control, launch
from autofit.worker.meter import Peak
from autofit.worker.meter.kinds import cuda
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Script,
    Shortage,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

PRELUDE = """
import os, signal, subprocess, sys, time
from multiprocessing.connection import Connection
from autofit.worker.launch import lifeline
from autofit.worker.harness.parent.agreement import Peers
from autofit.worker.harness.parent.pipe import connect
from autofit.worker.records.trials import *

spec, reporter, fd = connect()
lifeline.watch(fd, reporter.answered)
rank, request = spec.rank, spec.request
peers = Peers(reporter, request.ranks)
open(f"{request.script.cwd}/pid{rank}", "w").write(str(os.getpid()))
peers.agree("the start", None)

def raised(kind, message, **more):
    reporter.send(Raised(index=0, kind=kind, message=message, traceback=message, **more))

def gone():
    raised("error", "Connection closed by peer", follows=True)
    sys.exit(1)
"""

Run = Callable[..., list[LaunchEvent]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a body in each of two ranks; every process of theirs is gone afterwards."""

    def run(
        body: str, plan: Plan | None = None, timeout: float = 30.0, count: int = 2, **more: object
    ) -> list[LaunchEvent]:
        harness = tmp_path / "harness.py"
        harness.write_text(PRELUDE + textwrap.dedent(body))
        request = LaunchRequest(
            script=Script(target="train.py", cwd=str(tmp_path)),
            plans=(plan or Plan(),),
            device="cpu",
            budget=1 << 30,
            timeout=timeout,
            ranks=count,
        )
        heard = list(launch(request, harness=harness, **more))  # type: ignore[arg-type]
        for file in tmp_path.glob("pid*"):
            assert gone(int(file.read_text())), file.name
        return heard

    return run


def gone(pid: int) -> bool:
    """Whether a process is no more; a zombie that nobody has collected holds nothing."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def only_report(heard: list[LaunchEvent]) -> TrialReport:
    (report,) = [event for event in heard if isinstance(event, TrialReport)]
    return report


def seconds(heard: list[LaunchEvent]) -> float:
    assert isinstance(heard[-1], LaunchEnded)
    return heard[-1].seconds


def test_each_rank_finds_what_torchrun_sets(run: Run, tmp_path: Path) -> None:
    heard = run(
        """
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS"
        found = [os.environ[name] for name in names.split()]
        open(f"{request.script.cwd}/found{rank}", "w").write(" ".join(found))
        reporter.send(Finished(steps=3, stopped=False))
        """,
        environment={**os.environ, "OMP_NUM_THREADS": "3"},
    )
    for rank in range(2):
        found = (tmp_path / f"found{rank}").read_text()
        assert found == f"{rank} {rank} 2 2 0 127.0.0.1 3"
    (end,) = heard
    assert isinstance(end, LaunchEnded)
    assert (end.steps, end.stopped) == (3, False)


def test_the_environment_adds_to_the_users_own() -> None:
    alone = environments.environment(0, 1, 29400, {"HOME": "/here"})
    assert alone["HOME"] == "/here"
    assert alone["MASTER_PORT"] == "29400"
    assert "OMP_NUM_THREADS" not in alone
    assert environments.environment(1, 2, 29400, {})["OMP_NUM_THREADS"] == "1"
    assert environments.free_port() in environments.PORTS


def test_all_hear_what_each_says_and_the_first_one_tells_the_rest(run: Run) -> None:
    heard = run(
        """
        said = [peers.agree("a step", (rank, n)) for n in range(3)]
        assert said == [((0, n), (1, n), (2, n)) for n in range(3)], said
        if peers.leads:
            report = TrialReport(index=0, plan=request.plans[0], verdict=Verdict.MEASURED)
            reporter.send(PlanEnded(report=report))
        reporter.send(Finished(steps=3, stopped=True))
        time.sleep(60)
        """,
        count=3,
    )
    assert only_report(heard).verdict is Verdict.MEASURED
    assert seconds(heard) < 30


def test_ranks_that_stand_at_different_places_say_so(run: Run) -> None:
    report = only_report(
        run(
            """
            try:
                peers.agree("a step" if rank else "the end of the script", None)
            except Exception as error:
                raised("error", str(error))
            """
        )
    )
    assert report.verdict is Verdict.SCRIPT_FAILED
    assert "rank 0 is at the end of the script, rank 1 is at a step" in report.reason


def test_a_plan_is_asked_for_once_and_given_to_all(tmp_path: Path) -> None:
    """The controller's side of it: one question, one answer, and every rank has it."""
    harness = tmp_path / "harness.py"
    harness.write_text(
        PRELUDE
        + textwrap.dedent(
            """
            (plan,) = reporter.ask(fresh=False).plans
            (one, other) = peers.agree("the plan", plan)
            assert one == other == request.plans[0]
            reporter.send(Finished(steps=1, stopped=True))
            time.sleep(60)
            """
        )
    )
    from autofit.worker.records.trials import Answer, Asking

    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(),),
        device="cpu",
        budget=1 << 30,
        timeout=30.0,
        ranks=2,
        converses=True,
    )
    control, asked = Control(), 0
    for event in launch(request, harness=harness, control=control):
        if isinstance(event, Asking):
            asked += 1
            control.answer(Answer(plans=(Plan(),), timeout=30.0))
    assert asked == 1
    assert isinstance(event, LaunchEnded)
    assert event.stopped


def test_the_culprit_wins_over_those_that_lost_it(run: Run) -> None:
    heard = run(
        """
        if rank == 0:
            gone()
        time.sleep(0.5)
        raised("oom", "no memory", phase="backward")
        """
    )
    report = only_report(heard)
    assert report.verdict is Verdict.OUT_OF_MEMORY
    assert report.reason == "rank 1: no memory"
    assert report.out_of_memory is not None
    assert report.out_of_memory.phase == "backward"


def test_the_first_to_fail_decides(run: Run) -> None:
    report = only_report(
        run(
            """
            time.sleep(1.0 - rank)
            raised("error", "ValueError: a bug") if rank else raised("oom", "no memory")
            time.sleep(60)
            """
        )
    )
    assert (report.verdict, report.reason) == (Verdict.SCRIPT_FAILED, "rank 1: ValueError: a bug")
    assert report.traceback == "ValueError: a bug"


def test_a_rank_that_lost_another_is_believed_when_nobody_says_more(run: Run) -> None:
    heard = run("gone() if rank == 0 else time.sleep(60)")
    assert only_report(heard).reason == "rank 0: Connection closed by peer"
    assert REPORT_SECONDS <= seconds(heard) < 20


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1: killed by signal 9 (SIGKILL)"),
        ("os._exit(3)", "rank 1: exited with code 3"),
        ("os._exit(0)", "rank 1 ended by itself (exit code 0), and the others went on"),
    ],
)
def test_nobody_waits_for_a_dead_rank(run: Run, death: str, reason: str) -> None:
    heard = run(
        f"""
        if rank == 1:
            print("last words", flush=True)
            {death}
        peers.agree("a step", None)
        """
    )
    report = only_report(heard)
    assert (report.verdict, report.reason) == (Verdict.SCRIPT_FAILED, reason)
    assert "last words" in report.traceback
    assert seconds(heard) < 15


def test_ranks_that_hang_are_ended_and_it_says_who_waits(run: Run) -> None:
    heard = run("time.sleep(60) if rank else peers.agree('an optimizer step', None)", timeout=4.0)
    report = only_report(heard)
    assert report.verdict is Verdict.TIMED_OUT
    waits = "rank 0 is at an optimizer step, and waits for rank 1"
    assert report.reason == f"not done within 4 s: {waits}"


def test_nobody_waits_for_a_rank_that_was_stopped_alone(run: Run) -> None:
    """Memory ran out there while a plan was taken back: what is left is planned again."""
    (end,) = run(
        """
        if rank == 1:
            reporter.send(Finished(steps=3, stopped=True))
            time.sleep(60)
        peers.agree("a plan's proof", None)
        """
    )
    assert isinstance(end, LaunchEnded)
    assert end.stopped
    assert end.seconds < 15


def test_what_a_rank_counted_before_a_stage_is_not_in_its_figures() -> None:
    """Ranks are told to one another as they were in the stage: the worst of each counts."""
    window = [Step(1.0, 0.0, 0.5, retried=True)]
    stage = Window(Plan(), 1, compiled=3.0, refused=5, counted=window)
    one = stage.figures(Peak(1, 2, 3), compiled=4.5, refused=7)
    assert one == Figures(Peak(1, 2, 3), retries=1, refused=2, compiled=1.5, pressed=False)
    other = Figures(Peak(2, 2, 4), retries=2, refused=0, compiled=0.0, pressed=True)
    found = stage.measurement((one, other), Facts())
    assert (found.allocation_retries, found.allocations_refused) == (2, 2)
    assert found.compile_seconds == 1.5
    assert (found.peak_device, found.rank_peaks) == (4, (3, 4))
    assert stage.pressed, "on one of them"


def test_a_single_rank_of_torchrun_is_told_so_whatever_its_line_says() -> None:
    script = Script(
        target="train.py", cwd="/", environment=((environments.RUN_ID, environments.RUN),)
    )
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert told.items() <= launched(script, "cpu", 1).items()
    assert "RANK" not in launched(script, "cpu", 2)
    assert launched(Script(target="train.py", cwd="/"), "cpu", 1) == {}


@pytest.mark.parametrize("rank", ["-1", ""])
def test_a_local_rank_that_is_none_names_no_card(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some scripts and their users set it to -1 where one process trains."""
    monkeypatch.setenv(cuda.LOCAL_RANK, rank)
    assert meter.for_device("cuda")._index is None  # type: ignore[attr-defined]


def test_a_launch_is_cancelled_as_one(run: Run, tmp_path: Path) -> None:
    control = Control()
    threading.Timer(2.0, control.stop).start()
    heard = run("time.sleep(60) if rank else gone()", control=control)
    assert only_report(heard).verdict is Verdict.INTERRUPTED


def test_a_shortage_and_a_refusal_come_from_any_rank(run: Run) -> None:
    heard = run(
        """
        if rank == 0:
            peers.agree("a step", None)
        found = OutOfMemory(phase="forward", message="no memory")
        reporter.send(Shortage(index=0, out_of_memory=found))
        plan = request.plans[0]
        report = TrialReport(index=0, plan=plan, verdict=Verdict.REFUSED, reason="not here")
        reporter.send(PlanEnded(report=report))
        sys.exit(1)
        """,
        Plan.of({"micro_batch": "2"}),
    )
    (shortage,) = [event for event in heard if isinstance(event, Shortage)]
    assert shortage.out_of_memory.message == "rank 1: no memory"
    report = only_report(heard)
    assert (report.verdict, report.reason) == (Verdict.REFUSED, "not here")


def test_what_a_rank_leaves_behind_is_ended(run: Run, tmp_path: Path) -> None:
    run(
        """
        lost = subprocess.Popen(["sleep", "60"], start_new_session=True)
        open(f"{request.script.cwd}/pid{rank}lost", "w").write(str(lost.pid))
        peers.agree("the end", None)
        reporter.send(Finished(steps=0, stopped=True))
        time.sleep(60)
        """
    )
    assert len(list(tmp_path.glob("pid*lost"))) == 2


def test_ranks_that_cannot_start_leave_none_behind(tmp_path: Path) -> None:
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path / "nowhere")),
        plans=(Plan(),),
        device="cpu",
        budget=1 << 30,
        timeout=5.0,
        ranks=2,
    )
    with pytest.raises(WorkerError, match="cannot start"):
        list(launch(request))
