"""Determines the URL of the store. Imports no SQLAlchemy."""

from __future__ import annotations

import os
import re
from pathlib import Path

from autofit.exceptions import StorageError

VARIABLE = "AUTOFIT_STORAGE"
"""Environment variable that names the store, as ``--storage`` does."""

DEFAULT = "sqlite:///autofit.db"
"""A file in the working directory."""


def default_url() -> str:
    """Return the default URL of the store: ``$AUTOFIT_STORAGE``, else ``DEFAULT``."""
    return to_url(os.environ.get(VARIABLE) or DEFAULT)


def to_url(storage: str) -> str:
    """Return ``storage`` as an SQLAlchemy URL; without ``://`` it is the path of an SQLite file.

    Raises ``StorageError`` for an empty path or one with ``?``.

    >>> to_url("/data/autofit.db")
    'sqlite:////data/autofit.db'
    """
    if "://" in storage:
        return storage
    if "?" in storage or not storage:
        raise StorageError(
            f"the store cannot be at {storage!r}: give a path without '?', such as autofit.db,"
            f" or an SQLAlchemy URL, such as {DEFAULT}"
        )
    return f"sqlite:///{Path(storage).expanduser().absolute()}"


def exists(storage: str | None = None) -> bool:
    """Return ``False`` if the store is an SQLite file that does not exist, else ``True``."""
    url = default_url() if storage is None else to_url(storage)
    path = url.removeprefix("sqlite:///")
    return path == url or Path(path).exists()


def without_password(storage: str) -> str:
    """Return ``storage`` with passwords replaced by ``***``, for messages.

    >>> without_password("postgresql://me:secret@db/autofit")
    'postgresql://me:***@db/autofit'
    """
    unnamed = re.sub(r"(?<=://)([^:/]*):[^@]*@", r"\1:***@", storage)
    return re.sub(r"(?<=[?&])(\w*password)=[^&]*", r"\1=***", unnamed)
