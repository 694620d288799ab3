"""Run by Alembic: brings our tables, and no others, to a revision.

The connection comes from ``autofit.storage.engine`` and is in a transaction already, so that a
migration happens whole or not at all.
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
