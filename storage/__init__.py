"""Stores studies, trials, events and evidence in a database, through the class ``Store``.

Importing this package imports neither SQLAlchemy nor Optuna. The first use of ``Store`` does.
"""

if __name__ == "storage":
    raise ModuleNotFoundError("import it as autofit.storage")

import importlib
from typing import TYPE_CHECKING, Any

from autofit.storage.owner import Owner
from autofit.storage.records import (
    DiscoveryRecord,
    EventRecord,
    EvidenceKey,
    FittedKey,
    InspectionKey,
    MachineKey,
    Purpose,
    State,
    StudyKey,
    StudyRecord,
    TrialRecord,
    script_path,
)
from autofit.storage.searches import (
    AuditRecord,
    Limits,
    NoticeRecord,
    Outcome,
    SearchRecord,
    SearchState,
    Submission,
    TokenRecord,
)
from autofit.storage.url import default_url

if TYPE_CHECKING:
    from autofit.storage.accounts import Accounts
    from autofit.storage.queue import Queue
    from autofit.storage.store import Store


def __getattr__(name: str) -> Any:
    if name in ("Accounts", "Queue", "Store"):
        return getattr(importlib.import_module(f"autofit.storage.{name.lower()}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Accounts",
    "AuditRecord",
    "DiscoveryRecord",
    "EventRecord",
    "EvidenceKey",
    "FittedKey",
    "InspectionKey",
    "Limits",
    "MachineKey",
    "NoticeRecord",
    "Outcome",
    "Owner",
    "Purpose",
    "Queue",
    "SearchRecord",
    "SearchState",
    "State",
    "Store",
    "StudyKey",
    "StudyRecord",
    "Submission",
    "TokenRecord",
    "TrialRecord",
    "default_url",
    "script_path",
]
