"""The launcher against real children that speak the pipe protocol, and die in every way."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from autofit.exceptions import WorkerError
from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker.launch.child import Tail
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Learned,
    Measured,
    Printed,
    Script,
    Shortage,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

PRELUDE = """
import os, signal, subprocess, sys, time
from multiprocessing.connection import Connection
from autofit.strategies import Facts
from autofit.worker.launch import lifeline
from autofit.worker.records.trials import *

events = Connection(int(os.environ["AUTOFIT_EVENTS_FD"]), readable=False)
control = Connection(int(os.environ["AUTOFIT_CONTROL_FD"]), writable=False)
request = control.recv().request
lifeline.watch(control.fileno())
shortage = OutOfMemory(phase="backward", message="no memory")
measurement = Measurement(
    micro_batch=4, effective_batch=8, step_seconds=(0.1,), peak_allocated=1, peak_reserved=2,
    peak_device=3,
)

def raised(kind, message, **more):
    events.send(Raised(index=0, kind=kind, message=message, traceback="as Python has it", **more))
"""

NEUTRAL = Plan()
CHANGED = Plan.of({"precision": "bf16"})

Run = Callable[..., list[LaunchEvent]]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Iterator[LaunchEvent]]:
    def start(body: str, *plans: Plan, timeout: float = 30.0, **more: object) -> object:
        harness = tmp_path / "harness.py"
        harness.write_text(PRELUDE + textwrap.dedent(body))
        script = Script(target="train.py", cwd=str(tmp_path))
        request = LaunchRequest(
            script=script,
            plans=plans or (NEUTRAL,),
            device="cpu",
            budget=1 << 30,
            timeout=timeout,
            environment=(("ASKED", "yes"),),
        )
        return launch(request, harness=harness, **more)  # type: ignore[arg-type]

    return start  # type: ignore[return-value]


@pytest.fixture
def run(start: Callable[..., Iterator[LaunchEvent]]) -> Run:
    return lambda body, *plans, **more: list(start(body, *plans, **more))


def only_report(heard: list[LaunchEvent]) -> TrialReport:
    (report,) = [event for event in heard if isinstance(event, TrialReport)]
    return report


def test_what_the_script_prints_is_told_within_two_seconds(
    start: Callable[..., Iterator[LaunchEvent]],
) -> None:
    """Also if it prints nothing more."""
    launching = start("""
        events.send(Learned(facts=Facts()))
        print("first", flush=True)
        time.sleep(60)
    """)
    with closing(launching):  # type: ignore[type-var]
        assert next(launching) == Learned(facts=Facts())
        began = time.monotonic()
        assert next(launching) == Printed(text="first")
        assert time.monotonic() - began < 2.0


def ended(heard: list[LaunchEvent]) -> LaunchEnded:
    assert isinstance(heard[-1], LaunchEnded)
    return heard[-1]


def gone(pid: int, within: float = 5.0) -> bool:
    """Whether the process is no more (a zombie nobody collects counts as gone)."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_what_the_child_sends_is_passed_on_in_order(run: Run) -> None:
    heard = run(
        """
        events.send(PlanStarted(index=0, startup_seconds=1.5))
        events.send(Learned(facts=Facts(framework="lightning")))
        events.send(Shortage(index=0, out_of_memory=shortage))
        events.send(Measured(index=0, measurement=measurement))
        plan = request.plans[0]
        events.send(PlanEnded(report=TrialReport(index=0, plan=plan, verdict=Verdict.MEASURED)))
        events.send(Finished(steps=7, stopped=True))
        time.sleep(60)
        """
    )
    kinds = [type(event) for event in heard]
    assert kinds == [Learned, Shortage, Measured, TrialReport, LaunchEnded]
    assert heard[0] == Learned(facts=Facts(framework="lightning"))
    end = ended(heard)
    assert (end.steps, end.stopped, end.oom_killed) == (7, True, False)
    assert end.seconds < 30  # it was stopped, so nobody waits for it


@pytest.mark.parametrize(
    ("plan", "verdict"), [(NEUTRAL, Verdict.SCRIPT_FAILED), (CHANGED, Verdict.PLAN_FAILED)]
)
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11 (SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "killed by signal 15 (SIGTERM)"),
        ("sys.exit(3)", "exited with code 3"),
        ("events.send(Finished(steps=0, stopped=False)); sys.exit(3)", "exited with code 3"),
        ("raise NameError('lost')", "exited with code 1"),
    ],
)
def test_dying_without_a_word(
    run: Run, plan: Plan, verdict: Verdict, body: str, reason: str
) -> None:
    report = only_report(run(f"print('last words', flush=True)\n{body}", plan))
    assert (report.verdict, report.reason, report.index) == (verdict, reason, 0)
    assert report.killed == ("SIGKILL" in body or "SIGTERM" in body)
    assert "last words" in report.traceback
    assert ("NameError: lost" in report.traceback) == ("NameError" in body)


@pytest.mark.parametrize(
    ("words", "plan", "verdict"),
    [
        ("'oom', 'no memory', phase='forward', requested=9", NEUTRAL, Verdict.OUT_OF_MEMORY),
        ("'suspect', 'cuDNN error', corroborated=True, steps=3", CHANGED, Verdict.OUT_OF_MEMORY),
        ("'suspect', 'cuDNN error'", CHANGED, Verdict.PLAN_FAILED),
        ("'suspect', 'cuDNN error'", NEUTRAL, Verdict.SCRIPT_FAILED),
        ("'poisoned', 'device-side assert triggered'", CHANGED, Verdict.PLAN_FAILED),
        ("'error', 'NameError: x', blamed='precision'", CHANGED, Verdict.PLAN_FAILED),
        ("'error', 'NameError: x'", NEUTRAL, Verdict.SCRIPT_FAILED),
    ],
)
def test_an_exception_becomes_a_verdict(run: Run, words: str, plan: Plan, verdict: Verdict) -> None:
    heard = run(
        f"""
        events.send(PlanStarted(index=0, startup_seconds=1.5))
        events.send(Measured(index=0, measurement=measurement))
        raised({words})
        print("flushed at the end")
        sys.exit(1)
        """,
        plan,
    )
    report = only_report(heard)
    assert report.verdict == verdict
    assert report.reason in words
    assert report.startup_seconds == 1.5
    assert len(report.measurements) == 1
    assert "flushed at the end" in ended(heard).output
    if verdict is Verdict.OUT_OF_MEMORY:
        assert report.out_of_memory is not None
        assert report.out_of_memory.phase == (
            "forward" if "forward" in words else "outside the model"
        )
        assert report.out_of_memory.requested == (9 if "requested" in words else None)
        assert report.out_of_memory.steps == (3 if "steps" in words else 0)
    else:
        assert report.traceback == "as Python has it"
        assert report.blamed == ("precision" if "blamed" in words else None)


def test_bad_alloc_outside_python_is_out_of_memory(run: Run) -> None:
    report = only_report(
        run(
            """
            os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n")
            os.write(2, b"  what():  std::bad_alloc\\n")
            os.abort()
            """
        )
    )
    assert report.verdict is Verdict.OUT_OF_MEMORY
    assert "SIGABRT" in report.reason


def test_a_script_that_ends_by_itself_gets_no_report(run: Run) -> None:
    heard = run("events.send(Finished(steps=2, stopped=False))")
    (end,) = heard
    assert isinstance(end, LaunchEnded)
    assert (end.steps, end.stopped) == (2, False)


def test_a_plan_that_was_not_reached_gets_no_report(run: Run) -> None:
    heard = run(
        """
        plan = request.plans[0]
        events.send(PlanStarted(index=0))
        events.send(PlanEnded(report=TrialReport(index=0, plan=plan, verdict=Verdict.MEASURED)))
        sys.exit(1)
        """,
        NEUTRAL,
        CHANGED,
    )
    assert only_report(heard).verdict is Verdict.MEASURED


def test_a_later_plan_is_the_one_that_fails(run: Run) -> None:
    heard = run(
        """
        plan = request.plans[0]
        events.send(PlanStarted(index=0))
        events.send(PlanEnded(report=TrialReport(index=0, plan=plan, verdict=Verdict.MEASURED)))
        events.send(PlanStarted(index=1))
        os.abort()
        """,
        NEUTRAL,
        CHANGED,
    )
    _, report = [event for event in heard if isinstance(event, TrialReport)]
    assert (report.index, report.plan, report.verdict) == (1, CHANGED, Verdict.PLAN_FAILED)


def test_the_deadline_ends_the_launch(run: Run) -> None:
    started = time.monotonic()
    heard = run("print('busy', flush=True)\ntime.sleep(60)", timeout=1.5)
    report = only_report(heard)
    assert time.monotonic() - started < 6
    assert report.verdict is Verdict.TIMED_OUT
    assert report.reason == "not done within 1.5 s"
    assert "busy" in ended(heard).output


AUTO = Plan.of({"micro_batch": "auto"})
MEASURES = """
def measured(size, seconds):
    each = replace(measurement, micro_batch=size, step_seconds=(seconds,))
    events.send(Measured(index=0, measurement=each))

from dataclasses import replace
events.send(PlanStarted(index=0))
measured(8, 0.2)
measured(4, 0.1)
measured(2, 0.3)
time.sleep(60)
"""


def test_what_was_measured_before_the_deadline_counts(run: Run) -> None:
    report = only_report(run(MEASURES, AUTO, timeout=1.5))
    assert (report.verdict, report.reason) == (Verdict.MEASURED, "not done within 1.5 s")
    assert [each.micro_batch for each in report.measurements] == [2, 8, 4]
    assert report.best == Plan.of({"micro_batch": "4"})


@pytest.mark.parametrize(("size", "best"), [(16, "4"), (8, "4"), (4, "2"), (2, None), (None, None)])
def test_smaller_sizes_than_the_one_that_ran_out_count(
    run: Run, size: int | None, best: str | None
) -> None:
    end = f"raised('oom', 'CUDA out of memory', micro_batch={size})"
    report = only_report(run(MEASURES.replace("time.sleep(60)", end), AUTO))
    assert report.out_of_memory is not None
    assert report.verdict is (Verdict.MEASURED if best else Verdict.OUT_OF_MEMORY)
    assert report.best == (Plan.of({"micro_batch": best}) if best else None)


def test_what_stands_for_a_compiled_plan_before_the_deadline_does_not(run: Run) -> None:
    plan = Plan.of({"micro_batch": "auto", "compile": "regional"})
    assert only_report(run(MEASURES, plan, timeout=1.5)).verdict is Verdict.TIMED_OUT


def test_a_child_that_hangs_after_its_last_word_is_not_waited_for(run: Run) -> None:
    started = time.monotonic()
    heard = run("raised('error', 'boom')\nsignal.pause()")
    assert time.monotonic() - started < 10
    assert only_report(heard).reason == "boom"


def test_nothing_outlives_the_launch(run: Run, tmp_path: Path) -> None:
    run(
        f"""
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        children = [
            subprocess.Popen(sleep),
            subprocess.Popen(sleep, process_group=0),
            subprocess.Popen(sleep, start_new_session=True),
        ]
        forked = os.fork()
        if not forked:
            signal.pause()  # holds a copy of every pipe
        pids = [os.getpid(), forked, *(child.pid for child in children)]
        open({str(tmp_path / "pids")!r}, "w").write(" ".join(map(str, pids)))
        events.send(Finished(steps=1, stopped=True))
        signal.pause()
        """
    )
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 5
    assert all(gone(pid, within=0.1) for pid in pids)


def test_orphans_in_the_group_are_ended_when_the_child_has_died(run: Run, tmp_path: Path) -> None:
    heard = run(
        f"""
        forked = os.fork()
        if not forked:
            signal.pause()
        open({str(tmp_path / "pid")!r}, "w").write(str(forked))
        os.abort()
        """
    )
    assert "SIGABRT" in only_report(heard).reason
    assert gone(int((tmp_path / "pid").read_text()), within=0.1)


def test_closing_the_iterator_ends_the_child(
    start: Callable[..., Iterator[LaunchEvent]], tmp_path: Path
) -> None:
    launching = start(
        f"""
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        events.send(Learned(facts=Facts()))
        signal.pause()
        """
    )
    with closing(launching):  # type: ignore[type-var]
        next(launching)
    assert gone(int((tmp_path / "pid").read_text()), within=0.1)


def test_no_descriptor_is_left_open(run: Run) -> None:
    run("sys.exit(0)")
    before = sorted(os.listdir("/proc/self/fd"))
    run("sys.exit(0)")
    run("os.abort()")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_child_kills_its_group_when_the_parent_is_killed(tmp_path: Path) -> None:
    harness = tmp_path / "harness.py"
    harness.write_text(
        PRELUDE
        + textwrap.dedent(
            f"""
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open({str(tmp_path / "pids.new")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
            os.rename({str(tmp_path / "pids.new")!r}, {str(tmp_path / "pids")!r})
            signal.pause()
            """
        )
    )
    driver = psutil.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                from pathlib import Path
                from autofit.plan import Plan
                from autofit.worker.launch.launcher import launch
                from autofit.worker.records.trials import LaunchRequest, Script
                request = LaunchRequest(
                    script=Script(target="train.py", cwd={str(tmp_path)!r}), plans=(Plan(),),
                    device="cpu", budget=1 << 30, timeout=60,
                )
                list(launch(request, harness=Path({str(harness)!r}), scratch={str(tmp_path)!r}))
                """
            ),
        ]
    )
    pids = tmp_path / "pids"
    while not pids.exists():
        assert driver.poll() is None
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_the_environment_is_the_users_and_what_was_asked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOT_THE_USERS", "1")
    monkeypatch.setenv("AUTOFIT_SESSION", "f00")
    monkeypatch.setenv("LD_PRELOAD", "")
    user = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    heard = run(
        """
        for key in sorted(os.environ):
            print(key, os.environ[key], sep="=")
        print("cwd", os.getcwd(), sep="=")
        print("stdin", repr(sys.stdin.read()), sep="=")
        """,
        environment={**user, "WANDB_MODE": "online", "MINE": "kept"},
    )
    seen = dict(line.split("=", 1) for line in ended(heard).output.splitlines())
    assert (seen["MINE"], seen["ASKED"], seen["AUTOFIT_SESSION"]) == ("kept", "yes", "f00")
    assert seen["WANDB_MODE"] == "disabled"
    assert seen["MLFLOW_TRACKING_URI"].startswith("file:///")
    assert not Path(seen["MLFLOW_TRACKING_URI"].removeprefix("file://")).parent.exists()
    assert "NOT_THE_USERS" not in seen
    assert (seen["cwd"], seen["stdin"]) == (str(tmp_path), "''")


def test_much_output_neither_blocks_nor_stays_in_memory(run: Run) -> None:
    heard = run("for i in range(200_000): print('line', i)")
    lines = ended(heard).output.splitlines()
    assert len(lines) == 200
    assert lines[-1] == "line 199999"


def test_the_tail_shows_what_a_terminal_would() -> None:
    tail = Tail(lines=2, width=10)
    for piece in (b"gone\nfirst\n10%\r20", b"%\r30%\r\n", b"\xff" * 50):
        tail.feed(piece)
    assert str(tail).splitlines() == ["first", "30%", "\N{REPLACEMENT CHARACTER}" * 10]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    script = Script(target="train.py", cwd=str(tmp_path / "missing"))
    request = LaunchRequest(script=script, plans=(NEUTRAL,), device="cpu", budget=1, timeout=1)
    with pytest.raises(WorkerError, match="missing: No such file"):
        list(launch(request))
