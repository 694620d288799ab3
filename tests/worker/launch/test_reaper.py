"""The reaper against real processes that do not want to go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autofit.worker.launch import reaper
from autofit.worker.launch.reaper import SESSION, ProcessEntry, Reaper, kill_until_gone, processes

pytestmark = pytest.mark.quick

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def session() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "session"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("x")
    return folder


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        yield process
        process.kill()


def start(session: str, code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, SESSION: session},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )


def test_it_ends_the_session_and_what_that_started(
    session: str, folder: Path, bystander: subprocess.Popen[bytes]
) -> None:
    unmarked_child = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"sleep = [sys.executable, '-c', {SLEEP!r}]\n"
        "print(subprocess.Popen(sleep, env={}, start_new_session=True).pid, flush=True)\n"
        "signal.pause()"
    )
    process = start(session, unmarked_child)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    Reaper(session, folder).finish()
    assert process.wait(timeout=1) == -9
    assert not psutil.pid_exists(grandchild) or (
        psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
    )
    assert not folder.exists()
    assert bystander.poll() is None


def test_it_waits_for_as_long_as_the_pipe_holds(session: str, folder: Path) -> None:
    process = start(session, SLEEP)
    watching = Reaper(session, folder)
    time.sleep(0.3)
    assert process.poll() is None
    watching.finish()
    assert process.wait(timeout=1) == -9


def test_it_has_little_to_do_after_an_orderly_end(session: str, folder: Path) -> None:
    started = time.monotonic()
    Reaper(session, folder).finish()
    assert time.monotonic() - started < 2
    assert not folder.exists()


def test_it_does_not_hold_what_the_driver_had_open(session: str, folder: Path) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    watching = Reaper(session, folder)
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)
    watching.finish()


def test_a_process_of_an_odd_name_is_read_right(tmp_path: Path) -> None:
    python = tmp_path / "a) R 1 (b"
    python.symlink_to(sys.executable)
    with subprocess.Popen([python, "-S", "-c", SLEEP], start_new_session=True) as process:
        seen = processes()[process.pid]
        process.kill()
    assert (seen.parent, seen.group, seen.session) == (os.getpid(), process.pid, process.pid)


def test_a_reused_id_is_left_alone(bystander: subprocess.Popen[bytes]) -> None:
    def choose(table: dict[int, ProcessEntry]) -> list[ProcessEntry]:
        now = table[bystander.pid]
        return [
            ProcessEntry(now.pid, now.state, now.parent, now.group, now.session, now.started - 1)
        ]

    assert kill_until_gone(choose, seconds=1) == set()
    assert bystander.poll() is None


def test_it_needs_nothing_but_the_standard_library() -> None:
    names = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    code = f"import runpy; runpy.run_path({reaper.__file__!r}); {names}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert set(done.stdout.split()) <= sys.stdlib_module_names | {"__main__"}, done.stderr
