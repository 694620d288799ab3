"""The preloaded shim: exact counts, refusals that torch itself reports, and no crash."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autofit.exceptions import UsageError
from autofit.worker import meter
from autofit.worker.meter import build

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(build.shim() is None, reason="the shim needs Linux and a C compiler"),
]

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return what runs a script under the shim, with a meter at hand, and returns its output."""

    def run(body: str, cap: int | None = None) -> str:
        script = tmp_path / "script.py"
        script.write_text(
            "import os\n"
            "from autofit.worker import meter as meters\n"
            "meter = meters.for_device('cpu')\n"
            "meters.forget()\n" + textwrap.dedent(body)
        )
        done = subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | meter.environment("cpu", cap),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
        assert done.stderr == ""
        return done.stdout

    return run


def test_counts_are_exact_to_the_byte(run: Run) -> None:
    run("""
        import torch
        start = meter.current()
        a = torch.empty(1000, 1000)
        b = torch.empty(3, dtype=torch.int8)
        c = torch.empty(77, dtype=torch.float64)
        assert meter.current() - start == 4_000_000 + 3 + 77 * 8
        del a
        assert meter.current() - start == 3 + 77 * 8
        assert meter.peak().allocated - start == 4_000_000 + 3 + 77 * 8
        meter.reset()
        assert meter.peak().allocated == meter.current()
        d = torch.empty(10)
        d.resize_(1000)  # grown in place: both are held while it is copied
        assert meter.current() - start == 3 + 77 * 8 + 4000
        assert meter.peak().allocated - start == 3 + 77 * 8 + 4000 + 40
        del b, c, d
        assert meter.current() == start
        assert not meter.short()
    """)


def test_the_peak_of_a_training_step_is_in_proportion_to_the_batch(run: Run) -> None:
    run("""
        import torch
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        def peak(batch):
            meter.reset()
            before = meter.current()
            model(torch.ones(batch, 256)).sum().backward()
            model.zero_grad()
            return meter.peak().allocated - before
        peak(8)
        peaks = [peak(batch) for batch in (512, 1024, 2048)]
        slopes = [(b - a) / rows for a, b, rows in zip(peaks, peaks[1:], (512, 1024))]
        assert slopes[0] == slopes[1], peaks
        assert 4 * 1024 <= slopes[0] <= 8 * 1024, slopes  # activations, and two gradients of them
    """)


def test_a_refusal_is_torchs_own_error_and_the_process_goes_on(run: Run) -> None:
    run(
        """
        import torch
        held = torch.empty(5_000_000)
        for size in (30_000_000, 1 << 40):
            before = meter.refused()
            try:
                torch.empty(size, dtype=torch.int8)
            except RuntimeError as error:
                expected = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
                assert f"{expected} {size} bytes" in str(error), error
            else:
                raise AssertionError("not refused")
            assert meter.refused() == before + 1
        assert meter.current() == 20_000_000
        assert meter.peak().allocated == 20_000_000
        assert meter.short()
        meter.reset()
        torch.empty(meter.capacity - meter.current(), dtype=torch.int8)  # to the last byte
        assert meter.refused() == 2
        meter.set_cap(None)
        assert meter.capacity is None
        torch.empty(50_000_000)
        """,
        cap=40_000_000,
    )


def test_hundreds_of_refusals_at_random_points_crash_nothing(run: Run) -> None:
    output = run("""
        import random, torch
        from autofit.worker.oom.classifier import ErrorKind, classify
        random.seed(0)
        linear = torch.nn.Linear(512, 512)
        half = torch.nn.Linear(512, 512).bfloat16()
        conv = torch.nn.Conv2d(8, 16, 3)
        conv_half = torch.nn.Conv2d(8, 16, 3).bfloat16()
        lstm = torch.nn.LSTM(64, 64)
        attend = torch.nn.functional.scaled_dot_product_attention
        def step():
            rows, image = torch.randn(256, 512), torch.randn(4, 8, 48, 48)
            heads = torch.randn(2, 4, 64, 32, requires_grad=True)
            total = linear(rows).sum() + half(rows.bfloat16()).float().sum()
            total += conv(image).sum() + conv_half(image.bfloat16()).float().sum()
            total += lstm(torch.randn(16, 8, 64))[0].sum() + attend(heads, heads, heads).sum()
            with torch.autocast("cpu", torch.bfloat16):
                total += linear(rows).float().sum() + conv(image).float().sum()
            total.backward()
        step()
        base, (_, _, highest) = meter.current(), (meter.reset(), step(), meter.peak().allocated)
        failed = 0
        while failed < 250:
            meter.set_cap(base + random.randrange(highest - base))
            try:
                step()
            except RuntimeError as error:
                assert classify(error).kind is ErrorKind.OOM, error
                failed += 1
        meter.set_cap(None)
        step()
        print(failed, meter.refused() >= failed)
    """)
    assert output == "250 True\n"


def test_threads_neither_lose_nor_invent_bytes(run: Run) -> None:
    run(
        """
        import threading, torch
        start = meter.current()
        def work():
            for _ in range(3000):
                try:
                    x = torch.empty(100_003, dtype=torch.int8)
                except RuntimeError:
                    continue
                assert meter.current() <= 1_000_000
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert meter.current() == start, meter.current() - start
        assert meter.peak().allocated <= 1_000_000
        """,
        cap=1_000_000,
    )


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_loader_workers_inherit_neither_the_preload_nor_the_cap(run: Run, method: str) -> None:
    run(
        f"""
        import numpy, torch
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                ours = [name for name in os.environ if name.startswith("AUTOFIT")]
                assert not ours and "LD_PRELOAD" not in os.environ, os.environ
                torch.empty(40_000_000)  # a loader's memory is not the device's
                return torch.from_numpy(numpy.ones(3))
        if __name__ == "__main__":
            held = torch.empty(15_000_000, dtype=torch.int8)
            loader = torch.utils.data.DataLoader(
                Data(), batch_size=2, num_workers=2, multiprocessing_context="{method}")
            assert [batch.shape for batch in loader] == [(2, 3)] * 2
            assert meter.refused() == 0
        """,
        cap=20_000_000,
    )


def test_a_subprocess_inherits_nothing_and_the_users_own_preload_stays(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libdl.so.2")
    run("""
        import subprocess
        shown = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
        assert "LD_PRELOAD=libdl.so.2\\n" in shown, shown
        assert "AUTOFIT" not in shown and "/shim-" not in shown, shown
        assert meter.capacity is None and type(meter).__name__ == "ShimMeter"
    """)


def test_nothing_is_counted_that_is_not_torchs(run: Run) -> None:
    run(
        """
        import numpy
        numpy.ones(10_000_000).sum()
        bytearray(10_000_000)
        assert meter.current() == 0 and meter.refused() == 0
        import torch
        shared = torch.from_numpy(numpy.ones(1_000_000))
        assert meter.current() < 1000
        """,
        cap=1_000_000,
    )


@pytest.mark.full
def test_it_costs_next_to_nothing(run: Run) -> None:
    body = """
        import time, torch
        torch.set_num_threads(1)
        def seconds():
            start = time.process_time()  # other processes must not count
            for _ in range(30_000):
                torch.empty(16)
            return time.process_time() - start
        seconds()
        print(min(seconds() for _ in range(7)))
    """
    import_only = [sys.executable, "-c", textwrap.dedent(body)]
    plain = subprocess.run(import_only, capture_output=True, text=True, check=True, timeout=200)
    assert float(run(body)) < 2 * float(plain.stdout)  # below what can be seen on a quiet machine


# --- building ---------------------------------------------------------------------------------


def test_builds_side_by_side_agree(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    program = "from autofit.worker.meter import build; print(build.shim())"

    def build_once(_: int) -> str:
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=100
        )
        return done.stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build_once, range(4)))
    (path,) = map(Path, paths)
    assert path.parent == tmp_path / "autofit"
    assert list(path.parent.iterdir()) == [path]  # no scratch is left


def test_there_is_none_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    build.shim.cache_clear()
    try:
        assert build.shim() is None
        assert "LD_PRELOAD" not in meter.environment("cpu", None)
        with pytest.raises(UsageError, match="C compiler"):
            meter.environment("cpu", 1000)
    finally:
        build.shim.cache_clear()


def test_a_cache_whose_path_cannot_be_preloaded_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a folder"))
    build.shim.cache_clear()
    try:
        path = build.shim()
        assert path is not None
        assert " " not in str(path)
    finally:
        build.shim.cache_clear()


# --- python -m autofit.worker.cap -------------------------------------------------------------


def _cap(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autofit.worker.cap", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_an_untouched_script_dies_of_the_allocators_own_error() -> None:
    script = "import torch; torch.empty(10_000_000)"
    done = _cap("30MiB", "--", sys.executable, "-c", script)
    assert done.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000000 bytes" in (
        done.stderr
    )
    assert _cap("50MiB", "--", sys.executable, "-c", script).returncode == 0


def test_the_command_keeps_its_exit_code_and_arguments() -> None:
    done = _cap("1GiB", "--", sys.executable, "-c", "import sys; sys.exit(sys.argv[1])", "-x --")
    assert (done.returncode, done.stderr) == (1, "-x --\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: python -m autofit.worker.cap SIZE -- COMMAND"),
        (("1GiB", "python"), "usage: python -m autofit.worker.cap SIZE -- COMMAND"),
        (("banana", "--", "true"), "'banana' is not a size: write a number with a unit"),
        (("1GiB", "--", "no-such-command"), "cannot run 'no-such-command': No such file"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = _cap(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"autofit: {message}")
    assert done.stderr.count("\n") == 1
