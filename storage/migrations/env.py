"""Alembic runs this to migrate autofit's tables, but not Optuna's, to a revision.

``autofit.storage.engine`` provides a connection inside a transaction, so a migration is atomic.
"""

from __future__ import annotations

from typing import Any

from alembic import context

from autofit.storage.engine import VERSION_TABLE
from autofit.storage.models import Base


def ours(name: str | None, kind: str, _parents: Any) -> bool:
    """Return whether Alembic should look at this: Optuna's tables are in the same file."""
    return kind != "table" or name in Base.metadata.tables


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
    include_name=ours,
)
context.run_migrations()
