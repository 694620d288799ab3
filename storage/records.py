"""The frozen records that the store accepts and returns. Imports no SQLAlchemy."""

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
from autofit.worker.records.phases import Seconds
from autofit.worker.records.trials import Measurement, Script, TrialReport, Verdict

ORIGIN = "AUTOFIT_ORIGIN"
"""Environment variable of a submitted job: the original of its copied working directory."""


class State(StrEnum):
    """State of a trial. It may change from running to finished or to interrupted.

    A search deletes a trial that it ends without a verdict.
    """

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Its owner died. The state is final, and the plan gets a new trial."""


class Purpose(StrEnum):
    """Why a trial is run."""

    SEARCH = "search"
    """To measure a plan; each plan finishes at most one such trial in a study."""
    CONFIRM = "confirm"
    """To measure the winner again in a new process."""


def _script_file(script: Script) -> Path | None:
    """Return the file of ``script``; ``None`` for a module outside its working directory."""
    base = Path(script.cwd)
    if not script.module:
        file = (base / script.target).resolve()
        return file / "__main__.py" if file.is_dir() else file
    stem = base.joinpath(*script.target.split("."))
    files = (stem.with_name(f"{stem.name}.py"), stem / "__main__.py")
    return next((file.resolve() for file in files if file.is_file()), None)


def script_path(script: Script) -> str:
    """Return the store's name of ``script``: its absolute path without symbolic links.

    A module that is not found below the working directory keeps its name. In a job, the
    working directory is a copy for this job alone, and the path is that of the original
    (``ORIGIN``).
    """
    file = _script_file(script)
    origin, here = os.environ.get(ORIGIN), Path(script.cwd).resolve()
    if file is not None and origin and file.is_relative_to(here):
        return str(Path(origin, file.relative_to(here)))
    return str(file or script.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprinted:
    """Base class of what identifies something across searches."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of this key as canonical JSON, hexadecimal."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyKey(Fingerprinted):
    """The script and the options that are equal in all searches of one study."""

    script: str
    """The result of ``script_path``."""
    digest: str
    """SHA-256 of the script's file, hexadecimal; empty if there is no file."""
    args: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the script's launcher sets."""
    gpu: str
    """The driver's name of the device's model."""
    gpus: int
    """Number of devices of one training."""
    memory: int | None = None
    """The requested budget in bytes for each device; ``None`` if none was given."""
    allow: str
    """The largest change of the training that is allowed, as ``str(Fidelity)``."""
    spread: int = 1
    """Number of devices over which the search may spread a training of one process."""

    @classmethod
    def of(
        cls,
        script: Script,
        *,
        gpu: str,
        gpus: int,
        memory: int | None,
        allow: str,
        spread: int = 1,
    ) -> Self:
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
            spread=spread,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """A study at the moment when it was read."""

    id: str
    """Eight hexadecimal digits, with ``-2``, ``-3``, ... after searches with ``--fresh``."""
    key: StudyKey
    script: Script
    hardware: Hardware
    budget: int
    """Bytes for each device in the last search."""
    versions: Mapping[str, str]
    """Versions of packages in the last search."""
    facts: Facts | None
    """``None`` before the first launch has reported any."""
    left_out: tuple[tuple[str, str, str], ...]
    """``(strategy, level, reason)`` for each level that was refused or at fault, oldest first."""
    seconds: float
    """Total time of all searches."""
    launches: int
    """Number of processes started so far."""
    created: datetime
    """In UTC."""
    opened: datetime
    """Start of the last search, in UTC."""
    seconds_by_phase: Seconds = ()
    """Seconds outside of trials, by phase."""
    prefer: str = "fidelity"
    """``--prefer`` of the last search: which of equally fast plans is the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial at the moment when it was read."""

    id: int
    """Number of its row, unique in the store."""
    study: str
    number: int
    """0, 1, 2, ... in its study."""
    purpose: Purpose
    state: State
    plan: Plan
    launch: int
    """Number of its process: 0, 1, 2, ... in its study."""
    owner: Owner
    budget: int
    """Bytes for each device."""
    versions: Mapping[str, str]
    """Versions of packages when it ran."""
    created: datetime
    """In UTC."""
    ended: datetime | None = None
    """In UTC; ``None`` while it runs."""
    report: TrialReport | None = None
    """Its result, if it is finished."""

    @property
    def verdict(self) -> Verdict | None:
        """How it ended; ``None`` if it is not finished."""
        return self.report.verdict if self.report else None

    @property
    def measurement(self) -> Measurement | None:
        """The measurement of its best size, for a measured trial."""
        return self.report.measurement if self.report else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """An event outside trials, such as a real run that continued under another plan."""

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
class FittedKey(Fingerprinted):
    """Identifies calls of a decorated function that need the same memory."""

    function: str
    """Module and qualified name."""
    arguments: str
    """Digest of the arguments' shapes."""
    device: str
    """The driver's name of the device's model."""
    memory: int
    """Bytes of the device that the process may use."""
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceKey(Fingerprinted):
    """Conditions under which evidence is valid: script, devices and versions.

    The arguments of the script do not count, because most change nothing that a check looks at.
    What they may change is noticed at the model's calls: its parameters and attributes, the
    arguments of a call and its graph.
    """

    script: str
    digest: str
    """SHA-256 of the script's file, as in ``StudyKey``."""
    environment: tuple[tuple[str, str], ...]
    gpu: str
    gpus: int
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, script: Script, *, gpu: str, gpus: int, versions: Mapping[str, str]) -> Self:
        """Return the key of a script on ``gpus`` devices; errors as in ``StudyKey.of``."""
        study = StudyKey.of(script, gpu=gpu, gpus=gpus, memory=None, allow="")
        return cls(
            script=study.script,
            digest=study.digest,
            environment=study.environment,
            gpu=gpu,
            gpus=gpus,
            versions=tuple(sorted(versions.items())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKey(Fingerprinted):
    """Identifies machines on which equally many ranks communicate equally fast."""

    gpu: str
    """The driver's name of the device's model."""
    link: str
    """As in ``Hardware``."""
    torch: str
    """The version of PyTorch, which brings the library that sends."""

    @classmethod
    def of(cls, hardware: Hardware, versions: Mapping[str, str]) -> Self:
        """Return the key of a machine with devices like ``hardware``."""
        return cls(gpu=hardware.name, link=hardware.link, torch=versions.get("torch", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionKey(Fingerprinted):
    """Identifies the checks of one script; edits of the script do not change it."""

    script: str
    """The result of ``script_path``."""
    args: tuple[str, ...] = ()
    gpu: str
    """The driver's name of the device's model."""
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryRecord:
    """Something that was found out about what a key identifies; the newest of its name."""

    name: str
    content: Any
    """Plain JSON."""
    versions: Mapping[str, str]
    updated: datetime
    """In UTC."""
