"""A script under the harness is indistinguishable from ``python script.py``.

Each little program runs three times: with plain Python, in a trial and in a real run. What it
writes and its exit code must be the same; after the tests of coverage.py's ``execfile``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.running.run import run
from autofit.worker.launch.child import Child, python
from autofit.worker.launch.environment import HASH_SEED, TRACKERS_OFF, child_environment
from autofit.worker.launch.launcher import HARNESS
from autofit.worker.records.trials import ChildSpec, LaunchRequest, Script

PLAN = Plan.of({"micro_batch": "2"})
BUDGET = 1 << 30


@dataclass(frozen=True)
class Ended:
    """What a program wrote, and its exit code (minus the signal that ended it)."""

    code: int
    out: str
    err: str = ""
    """Empty where both streams went to one pipe."""


Start = Callable[[tuple[str, ...]], Ended]


def programs(names: Iterable[str], quick: tuple[str, ...]) -> list[object]:
    """Each program as a parameter; ``make test`` looks at those named."""
    marks = {name: pytest.mark.quick if name in quick else pytest.mark.full for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def plainly(command: tuple[str, ...], *, together: bool) -> Ended:
    """Run it with plain Python, in the working directory."""
    ended = subprocess.run(
        [sys.executable, *command],
        env=os.environ,  # and not what readline wrote behind Python's back
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        text=True,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr or "")


def in_a_trial(command: tuple[str, ...], scratch: Path) -> Ended:
    """Run it as a launch does; a program that ends by itself ends as it would."""
    request = LaunchRequest(
        script=script(command), plans=(Plan(), PLAN), device="cpu", budget=BUDGET, timeout=60
    )
    variables = child_environment(request, os.environ, scratch)
    with Child.start(python(HARNESS), ChildSpec(request=request), variables) as child:
        for _ in child.events():
            pass
        assert child.returncode is not None
        return Ended(child.returncode, str(child.tail))


def for_real(command: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> Ended:
    """Run it as ``autofit run`` does."""
    capfd.readouterr()
    code = run(script(command), plan=PLAN, storage="sqlite://", memory=BUDGET)
    written = capfd.readouterr()
    return Ended(code if code < 128 else 128 - code, written.out, written.err)


def script(command: tuple[str, ...]) -> Script:
    """Return the record of ``python *command``."""
    module = command[0] == "-m"
    target, *args = command[1:] if module else command
    return Script(target=target, module=module, args=tuple(args), cwd=os.getcwd())


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Write files into a fresh working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(textwrap.dedent(text).lstrip("\n"))

    return write


@pytest.fixture
def same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[tuple[str, ...]], Ended]:
    """Run a command in all three ways; return how it ended when they agree."""

    def same(command: tuple[str, ...]) -> Ended:
        expected = plainly(command, together=True)
        found = in_a_trial(command, tmp_path)
        assert (found.code, found.out.rstrip()) == (expected.code, expected.out.rstrip())
        expected = plainly(command, together=False)
        assert for_real(command, capfd) == expected
        return expected

    return same


SHOW_MAIN = """
'''Its documentation.'''
import sys
here = dict(globals())
print(sorted(here))
for name in ("name", "doc", "package", "builtins", "annotations", "file", "cached"):
    print(name, here.get(f"__{name}__"))
print(__spec__ and [__spec__.name, __spec__.origin, __spec__.parent, __spec__.has_location])
print(type(__loader__), __loader__.name, __loader__.path)
print(sys.argv, sys.path[0], sys.orig_argv[1:])
import __main__, os
print(__main__.__dict__ is globals(), sys.modules["__main__"] is __main__, type(__main__))
print(os.getcwd())
"""

WHAT_IT_IS = {
    "script.py": ({"script.py": SHOW_MAIN}, ("script.py", "a b", "--flag", "")),
    "below": ({"a/script.py": SHOW_MAIN}, ("a/script.py",)),
    "dotted": ({"a/script.py": SHOW_MAIN}, ("./a/../a/script.py",)),
    "module": ({"mod.py": SHOW_MAIN}, ("-m", "mod", "x", "-m")),
    "inner module": ({"pkg/__init__.py": "", "pkg/mod.py": SHOW_MAIN}, ("-m", "pkg.mod")),
    "package": (
        {"pkg/__init__.py": "print(__name__)", "pkg/__main__.py": SHOW_MAIN},
        ("-m", "pkg", "x"),
    ),
    "namespace": ({"space/mod.py": SHOW_MAIN}, ("-m", "space.mod")),
    "folder": ({"folder/__main__.py": SHOW_MAIN}, ("folder", "x")),
}


@pytest.mark.parametrize("which", programs(WHAT_IT_IS, ("script.py", "inner module", "package")))
def test_it_is_main(write: Callable[..., None], same: Start, which: str) -> None:
    files, command = WHAT_IT_IS[which]
    write(files)
    assert same(command).code == 0


@pytest.mark.full
def test_it_is_main_through_a_link(write: Callable[..., None], same: Start) -> None:
    write({"real/script.py": SHOW_MAIN + "import beside", "real/beside.py": "print(__file__)"})
    Path("link.py").symlink_to("real/script.py")
    Path("linked").symlink_to("real")
    assert same(("link.py",)).code == 0
    assert same(("linked/script.py",)).code == 0


@pytest.mark.full
def test_it_is_main_by_its_whole_path(write: Callable[..., None], same: Start) -> None:
    write({"script.py": SHOW_MAIN})
    assert same((str(Path("script.py").resolve()), "x")).code == 0


ENDS = {
    "by itself": ("print('done')", 0),
    "exit 0": ("import sys; sys.exit()", 0),
    "exit 3": ("import sys; sys.exit(3)", 3),
    "exit with a text": ("import sys; sys.exit('that was it')", 1),
    "exit with a number too large": ("raise SystemExit(257)", 1),
    "exit in a finally block": ("try: 1 / 0\nfinally: raise SystemExit(4)", 4),
    "at once": ("import os; print('x', flush=True); os._exit(5)", 5),
    "uncaught": ("1 / 0", 1),
    "interrupted": ("raise KeyboardInterrupt", -2),
    "interrupted by a signal": ("import os; os.kill(os.getpid(), 2)", -2),
    "killed": ("import os; os.kill(os.getpid(), 9)", -9),
}


@pytest.mark.parametrize(
    "how",
    programs(ENDS, ("exit 3", "exit with a text", "uncaught", "interrupted by a signal", "killed")),
)
def test_it_ends_as_it_would(write: Callable[..., None], same: Start, how: str) -> None:
    body, code = ENDS[how]
    last = """
    import atexit, sys
    class Last:
        def __del__(self):
            print("deleted")
    last = Last()
    atexit.register(print, "at exit")
    print("not flushed yet")
    print("error stream", file=sys.stderr)
    """
    write({"script.py": textwrap.dedent(last) + body})
    ended = same(("script.py",))
    assert ended.code == code
    if how not in ("at once", "killed"):
        assert ended.out.endswith("at exit\ndeleted\n")


SHOWS = {
    "nested": """
        def outer(): inner()
        def inner(): raise ValueError("bad", 3)
        outer()
        """,
    "chained": """
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("bad") from error
        """,
    "context": """
        try:
            {}["key"]
        finally:
            1 / 0
        """,
    "grouped": """
        def fail(number): raise ValueError(number)
        errors = []
        for number in range(3):
            try:
                fail(number)
            except ValueError as error:
                errors.append(error)
        raise ExceptionGroup("several", errors)
        """,
    "with a note": """
        error = ValueError("bad")
        error.add_note("and a note")
        raise error
        """,
    "SyntaxError in it": "x = (\ny = 1 1\n",
    "IndentationError in it": "if True:\nprint(1)\n",
    "SyntaxError in a module": "import broken",
    "no such module": "import no_such_module_anywhere",
    "in a thread": """
        import threading
        def fail(): raise ValueError("in a thread")
        thread = threading.Thread(target=fail, name="worker")
        thread.start()
        thread.join()
        """,
    "its own hook": """
        import sys, traceback
        def hook(kind, error, where):
            print("hook", kind, error, [frame.name for frame in traceback.extract_tb(where)])
            print([frame.name for frame in traceback.extract_tb(error.__traceback__)])
        sys.excepthook = hook
        def fail(): raise ValueError("bad")
        fail()
        """,
    "warnings": """
        import warnings
        warnings.warn("old", DeprecationWarning)
        print(1 is 1)
        """,
    "printed by itself": """
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        """,
}


@pytest.mark.parametrize(
    "what",
    programs(SHOWS, ("chained", "SyntaxError in it", "no such module", "its own hook")),
)
def test_it_shows_what_it_would(write: Callable[..., None], same: Start, what: str) -> None:
    write({"script.py": SHOWS[what], "broken.py": "def f(:\n"})
    ended = same(("script.py",))
    assert "autofit" not in ended.err


@pytest.mark.full
def test_a_recursion_without_end(write: Callable[..., None], same: Start) -> None:
    """The count of frames left is not the same; the rest of the traceback is."""
    body = """
    import sys, traceback
    def hook(kind, error, where):
        print(kind, error, len(traceback.extract_tb(where)) > 900)
    sys.excepthook = hook
    def deeper(): deeper()
    deeper()
    """
    write({"script.py": body})
    assert "RecursionError" in same(("script.py",)).out


WORKS = {
    "pickling": """
        import pickle
        class Thing:
            def __init__(self): self.x = 3
        text = pickle.dumps(Thing())
        print(text, pickle.loads(text).x)
        """,
    "looking at its source": """
        import inspect, sys
        def function():
            return 1  # a comment
        class Thing:
            x = 1
        print(inspect.getsource(function), inspect.getsource(Thing))
        print(inspect.getsource(sys.modules["__main__"]))
        """,
    "its own modules": """
        import meter, program, records, strategies, worker
        print(meter.x, program.x, records.x, strategies.x, worker.x)
        """,
    "future statements": """
        from __future__ import annotations
        def f(x: No): ...
        print(f.__annotations__)
        """,
    "no future statements": """
        try:
            def f(x: No): ...
        except NameError as error:
            print(error)
        """,
    "annotations of the module": "x: int = 3\nprint(__annotations__)",
    "a thread that goes on": """
        import threading, time
        x = 1
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread", x))).start()
        print("main is done")
        """,
    "signals": """
        import signal
        for one in ("SIGINT", "SIGTERM", "SIGPIPE", "SIGCHLD", "SIGHUP"):
            print(one, signal.getsignal(getattr(signal, one)))
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """,
    "files and limits": """
        import os, resource, subprocess, sys
        print(sorted(os.listdir("/proc/self/fd")) and sys.stdin.read() == "")
        subprocess.run(["ls", "/proc/self/fd"], close_fds=False)
        print(os.umask(0), resource.getrlimit(resource.RLIMIT_DATA), os.nice(0))
        """,
    "threads": """
        import threading
        print(threading.active_count() <= 2, threading.main_thread().name)
        """,
    "fork": """
        import os
        x = "kept"
        if not os.fork():
            print("child", x)
            raise SystemExit(3)
        print("parent", os.wait()[1])
        """,
    "the heavy are not there": """
        import sys
        print([n for n in ("torch", "numpy", "ray", "optuna", "sqlalchemy") if n in sys.modules])
        """,
    "a module that is main again": """
        import sys
        if __name__ == "__main__":
            import script
            print(script is sys.modules["__main__"], script.__name__)
        """,
}


@pytest.mark.parametrize(
    "what",
    programs(
        WORKS,
        ("pickling", "its own modules", "signals", "fork", "the heavy are not there"),
    ),
)
def test_it_works_as_it_would(write: Callable[..., None], same: Start, what: str) -> None:
    names = ("meter", "program", "records", "strategies", "worker")
    write({"script.py": WORKS[what]} | {f"{name}.py": f"x = '{name}'" for name in names})
    ended = same(("script.py",))
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize("method", programs(("spawn", "fork", "forkserver"), ("spawn",)))
@pytest.mark.parametrize("module", [pytest.param(False, marks=pytest.mark.full), True])
def test_it_has_workers(write: Callable[..., None], same: Start, method: str, module: bool) -> None:
    body = f"""
    import multiprocessing, os, sys
    print(__name__ in ("__main__", "__mp_main__"))
    class Thing:
        x = 3
    def work(thing):
        seen = [key for key in os.environ if "AUTOFIT" in key or key == "LD_PRELOAD"]
        return thing.x, sys.argv, sys.path[0], __name__, seen, "autofit" in sys.modules
    if __name__ == "__main__":
        with multiprocessing.get_context({method!r}).Pool(1) as pool:
            found = pool.map(work, [Thing()])[0]
            print(found[:5], found[5] and {method != "fork"})  # only a fork knows of us
    """
    write({"pkg/__init__.py": "", "pkg/script.py": body})
    command = ("-m", "pkg.script", "x") if module else ("pkg/script.py", "x")
    ended = same(command)
    assert ended.code == 0
    assert ended.out.endswith("[]) False\n")


@pytest.mark.quick
def test_its_environment_is_the_users(
    write: Callable[..., None], same: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what keeps a trial out of the user's trackers, and what makes it repeat itself."""
    trial = [*TRACKERS_OFF, *HASH_SEED, "MLFLOW_TRACKING_URI"]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "123")
    body = f"""
    import os, subprocess, sys
    for name in {trial!r}:
        os.environ.pop(name, None)
    show = "import os; print(sorted(os.environ.items()))"
    print(sorted(os.environ.items()))
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", show])
    """
    write({"script.py": body})
    out = same(("script.py",)).out
    assert "AUTOFIT" not in out
    assert "LD_PRELOAD" not in out


@pytest.mark.full
def test_pythonsafepath(
    write: Callable[..., None], same: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    write({"script.py": "import sys; print(sys.path)"})
    assert same(("script.py",)).code == 0


MODEL = """
import os, sys
print("torch" in sys.modules)
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
print(torch.get_num_threads(), torch.__name__, torch.__spec__.name, type(torch.__loader__))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return fail(self.linear(x)) if WHERE == "forward" else self.linear(x)

class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return fail(gradient) if WHERE == "backward" else gradient

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return fail(torch.ones(4)) if WHERE == "data" else torch.arange(4.0) + index

def fail(x):
    raise ValueError(f"bad {x.dim()}")

model = nn.Sequential(Block(), Block())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Data(), batch_size=4):
    Fragile.apply(model(batch)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("forward", marks=pytest.mark.full),
        pytest.param("backward", marks=pytest.mark.full),
        pytest.param("data", marks=pytest.mark.full),
    ],
)
def test_an_error_through_torch(write: Callable[..., None], same: Start, where: str) -> None:
    """Raised between our wrappers and torch's own frames; torch came only when it was asked for."""
    write({"script.py": f"WHERE = {where!r}\n" + MODEL.lstrip()})
    ended = same(("script.py",))
    assert ended.out.startswith("False\n1 torch")
    assert ended.err.endswith(f"ValueError: bad {1 if where == 'data' else 2}\n")
