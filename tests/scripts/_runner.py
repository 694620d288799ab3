"""Runs the scripts of this folder as a person would, plainly and under a plan, and compares."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.told import beside_the_check

HERE = Path(__file__).resolve().parent
AT_ONCE = 2
LIMIT = 240.0
"""Seconds for one run; the slowest takes ten on an idle machine."""
TOLERANCE = 1e-9
"""Largest relative difference of parameters and printed numbers after 20 steps in float64."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
Levels = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One run of one script; ``levels`` is ``None`` for plain Python."""

    script: str
    levels: tuple[tuple[str, str], ...] | None = None
    arguments: tuple[str, ...] = ()
    memory: str | None = None
    """Cap on the tensors' bytes; given to plain Python through ``autofit.worker.cap``."""
    ranks: int = 1
    environment: tuple[tuple[str, str], ...] = ()

    def under(self, levels: Levels) -> Asked:
        """Return the same run under a plan."""
        return replace(self, levels=tuple(sorted(levels.items())))


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a run left."""

    code: int
    """The first rank's exit code."""
    output: str
    errors: str
    folder: Path
    """Its working directory."""

    @property
    def state(self) -> Any:
        """What the script saved at its end."""
        return torch.load(self.folder / "model.pt", weights_only=True)

    @property
    def said(self) -> list[str]:
        """What autofit said."""
        return [line for line in self.errors.splitlines() if line.startswith("autofit: ")]

    @property
    def saved(self) -> bool:
        """Whether the script came to its end."""
        return (self.folder / "model.pt").exists()


class Runs:
    """Real processes, two at a time; a run that several tests look at is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._asked: dict[Asked, Future[Done]] = {}

    def ahead(self, runs: Sequence[Asked]) -> None:
        """Start what will be asked for later."""
        for asked in runs:
            self._future(asked)

    def of(self, asked: Asked) -> Done:
        """Return a run's outcome; what waits behind those begun ahead runs here and now."""
        future = self._future(asked)
        if future.cancel():
            self._asked[asked] = future = Future()
            future.set_result(run(asked, self._new_folder(asked)))
        return future.result()

    def close(self) -> None:
        """Start nothing more; wait for what runs."""
        self._pool.shutdown(cancel_futures=True)

    def _future(self, asked: Asked) -> Future[Done]:
        if asked not in self._asked:
            self._asked[asked] = self._pool.submit(run, asked, self._new_folder(asked))
        return self._asked[asked]

    def _new_folder(self, asked: Asked) -> Path:
        return self._folder / f"{next(self._numbers):03}-{asked.script}"


def run(asked: Asked, folder: Path) -> Done:
    """Run a script in ``folder``, one process a rank; return what the first rank left.

    Without the line that a plan for which there is no evidence is verified first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = _command(asked, folder)
    environment = _environment(asked)
    others = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(1, asked.ranks)
    ]
    try:
        first = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        for other in others:
            other.wait(LIMIT)
    finally:
        for other in others:
            other.kill()
            other.wait()
    code = next((c for c in [first.returncode, *(o.returncode for o in others)] if c), 0)
    errors = beside_the_check(first.stderr)
    return Done(code=code, output=first.stdout, errors=errors, folder=folder)


def _command(asked: Asked, folder: Path) -> list[str]:
    target = _target(asked.script, folder)
    given = ["--out", "model.pt", *asked.arguments]
    if asked.levels is None:
        capped = ["-m", "autofit.worker.cap", asked.memory, "--", sys.executable]
        return [sys.executable, *(capped if asked.memory else []), *target, *given]
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"plan": dict(asked.levels)}))
    memory = ["--memory", asked.memory] if asked.memory else []
    options = ["--plan", str(plan), *memory]
    return [sys.executable, "-m", "autofit", "run", *options, *target, "--", *given]


def _target(script: str, folder: Path) -> list[str]:
    """Return a script's path, or ``-m PACKAGE``, copied to where Python finds it."""
    if script.endswith(".py"):
        return [str(HERE / script)]
    shutil.copytree(HERE / script, folder / script, dirs_exist_ok=True)
    return ["-m", script]


def _environment(asked: Asked) -> dict[str, str]:
    settings = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if asked.ranks > 1:
        settings |= {"RANK": "0", "WORLD_SIZE": str(asked.ranks), "MASTER_ADDR": "127.0.0.1"}
        settings["MASTER_PORT"] = str(_free_port())
    kept = {name: value for name, value in os.environ.items() if name != "AUTOFIT_STORAGE"}
    return kept | settings | dict(asked.environment)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


# --- comparing -----------------------------------------------------------------------------


def assert_same_text(found: str, expected: str, tolerance: float, clock: str | None = None) -> None:
    """Line by line: words exactly, numbers within ``tolerance`` relative, what ``clock`` matches
    not at all."""
    if clock is not None:
        found, expected = re.sub(clock, "CLOCK", found), re.sub(clock, "CLOCK", expected)
    lines, theirs = found.splitlines(), expected.splitlines()
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in theirs]
    for line, other in zip(lines, theirs, strict=True):
        for ours, their in zip(NUMBER.findall(line), NUMBER.findall(other), strict=True):
            assert _close(ours, their, tolerance), f"{line!r} for {other!r}"


def _close(ours: str, theirs: str, tolerance: float) -> bool:
    if ours == theirs:
        return True
    decimals = len(theirs.partition(".")[2])
    last_place = 10.0**-decimals if decimals >= 9 else 0.0
    largest = max(abs(float(ours)), abs(float(theirs)))
    return abs(float(ours) - float(theirs)) <= tolerance * largest + 1.01 * last_place


def assert_same_state(found: Any, expected: Any, tolerance: float) -> None:
    """The same names, shapes and kinds; each tensor within ``tolerance`` of its own norm.

    A tensor that is next to nothing beside the whole (a bias that started at zero and has no
    gradient but rounding) is measured by a millionth of the whole's norm.
    """
    ours, theirs = dict(_leaves(found)), dict(_leaves(expected))
    assert list(ours) == list(theirs)
    tensors = [t.double() for t in theirs.values() if isinstance(t, torch.Tensor)]
    floor = 1e-6 * float(torch.stack([t.norm() for t in tensors]).norm())
    for name, value in theirs.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            assert bool(torch.as_tensor(ours[name] == value).all()), name
            continue
        assert ours[name].shape == value.shape, name
        assert ours[name].dtype == value.dtype, name
        distance = float((ours[name].double() - value.double()).norm())
        scale = max(float(value.double().norm()), floor)
        assert distance <= tolerance * scale, f"{name} differs by {distance / scale:.1e}, relative"


def _leaves(state: Any) -> Iterator[tuple[str, Any]]:
    found, _ = tree_flatten_with_path(state)
    for path, leaf in found:
        yield keystr(path), leaf
