"""What the store takes and gives: frozen records, never rows. Imports no SQLAlchemy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from autofit.exceptions import UsageError
from autofit.facts import Facts, Hardware
from autofit.plan import Plan
from autofit.storage.owner import Owner
from autofit.worker.records.trials import Measurement, Script, TrialReport, Verdict

ORIGIN = "AUTOFIT_ORIGIN"
"""Environment variable of a submitted job: the folder that its working directory is a copy of."""


class State(StrEnum):
    """Where a trial is. Legal moves: running to finished, running to interrupted."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Not reached, or its owner died. Final: the plan gets a new trial."""


class Purpose(StrEnum):
    """Why a trial is run."""

    SEARCH = "search"
    """To learn what the plan is worth; finished at most once per plan and study."""
    CONFIRM = "confirm"
    """The winner measured again in a fresh process."""


def _script_file(script: Script) -> Path | None:
    """Return the file of ``script``; ``None`` for a module that is not below its directory."""
    base = Path(script.cwd)
    if not script.module:
        file = (base / script.target).resolve()
        return file / "__main__.py" if file.is_dir() else file
    stem = base.joinpath(*script.target.split("."))
    files = (stem.with_name(f"{stem.name}.py"), stem / "__main__.py")
    return next((file.resolve() for file in files if file.is_file()), None)


def script_path(script: Script) -> str:
    """Return what the store calls ``script``: its absolute path, links followed.

    A module that is not found below the working directory keeps its name. What was shipped to a
    cluster is called as where it came from (``ORIGIN``): the folder it lies in there is of one job.
    """
    file = _script_file(script)
    origin, here = os.environ.get(ORIGIN), Path(script.cwd).resolve()
    if file is not None and origin and file.is_relative_to(here):
        return str(Path(origin, file.relative_to(here)))
    return str(file or script.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyKey:
    """What makes two searches the same one: the script and what was asked."""

    script: str
    """As ``script_path`` says."""
    digest: str
    """SHA-256 of the script's file, hexadecimal; empty where there is no file to read."""
    args: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """What its launcher sets for the script."""
    gpu: str
    """The device's model, as the driver names it."""
    gpus: int
    """How many devices one training run spans."""
    memory: int | None = None
    """Bytes per device that were asked for; ``None`` when none were."""
    allow: str
    """The highest fidelity allowed, as ``str(Fidelity)``."""

    @classmethod
    def of(cls, script: Script, *, gpu: str, gpus: int, memory: int | None, allow: str) -> Self:
        """Return the key of a search of ``script``; raise ``UsageError`` if it cannot be read."""
        file = _script_file(script)
        try:
            digest = hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
        except OSError as error:
            raise UsageError(
                f"the script {script.target} cannot be read: {error.strerror}"
            ) from error
        return cls(
            script=script_path(script),
            digest=digest,
            args=script.args,
            environment=script.environment,
            gpu=gpu,
            gpus=gpus,
            memory=memory,
            allow=allow,
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of this key as canonical JSON, hexadecimal; an empty environment is left out."""
        plain = asdict(self)
        if not self.environment:
            del plain["environment"]
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """One study, as it was when it was read."""

    id: str
    """Eight hexadecimal digits, and ``-2``, ``-3``, ... where a search was begun afresh."""
    key: StudyKey
    script: Script
    hardware: Hardware
    budget: int
    """Bytes per device when it was last opened."""
    versions: Mapping[str, str]
    """When it was last opened."""
    facts: Facts | None
    """``None`` before the first launch has learned any."""
    left_out: tuple[tuple[str, str, str], ...]
    """``(strategy, level, reason)`` for each level refused or blamed, in that order."""
    seconds: float
    """Searched so far."""
    launches: int
    """Processes started so far."""
    created: datetime
    """In UTC."""
    opened: datetime
    """Last time, in UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial, as it was when it was read."""

    id: int
    """Its row: unique in the store."""
    study: str
    number: int
    """0, 1, 2, ... in its study."""
    purpose: Purpose
    state: State
    plan: Plan
    launch: int
    """The process it runs in: 0, 1, 2, ... in its study."""
    owner: Owner
    budget: int
    """Bytes per device it ran under."""
    versions: Mapping[str, str]
    """It ran with."""
    created: datetime
    """In UTC."""
    ended: datetime | None = None
    """In UTC; ``None`` while it runs."""
    optuna_number: int | None = None
    """Its number in Optuna's mirror; ``None`` before it was told."""
    report: TrialReport | None = None
    """For a finished trial, and only for such."""

    @property
    def verdict(self) -> Verdict | None:
        """How it ended; ``None`` unless it is finished."""
        return self.report.verdict if self.report else None

    @property
    def measurement(self) -> Measurement | None:
        """The winner's measurement, for a measured trial."""
        return self.report.measurement if self.report else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something worth keeping that happened outside a trial, such as the rescue of a real run."""

    id: int
    kind: str
    payload: Mapping[str, Any]
    """Plain JSON."""
    versions: Mapping[str, str]
    study: str | None
    trial: int | None
    """``TrialRecord.id``."""
    created: datetime
    """In UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedKey:
    """Which calls of a decorated function are alike."""

    function: str
    """Module and qualified name."""
    arguments: str
    """Digest of the arguments' shapes."""
    device: str
    """The model, as the driver names it."""
    memory: int
    """Bytes of it that the process may use."""
    ranks: int = 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of this key as canonical JSON, hexadecimal."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRecord:
    """What held in a decorated function."""

    key: FittedKey
    kept: Mapping[str, int | str]
    """Plain JSON: ``{"batch_size": 64}``, ``{"plan": ...}`` or ``{"samples": 8}``."""
    versions: Mapping[str, str]
    updated: datetime
    """In UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceKey:
    """Where evidence holds: the script, how it is started, on what, with which versions."""

    script: str
    digest: str
    """Of the script's file, as in ``StudyKey``."""
    args: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    gpu: str
    gpus: int
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, script: Script, *, gpu: str, gpus: int, versions: Mapping[str, str]) -> Self:
        """Return the key of a script on ``gpus`` devices; raise ``UsageError`` as ``StudyKey``."""
        study = StudyKey.of(script, gpu=gpu, gpus=gpus, memory=None, allow="")
        return cls(
            script=study.script,
            digest=study.digest,
            args=study.args,
            environment=study.environment,
            gpu=gpu,
            gpus=gpus,
            versions=tuple(sorted(versions.items())),
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of this key as canonical JSON, hexadecimal."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
