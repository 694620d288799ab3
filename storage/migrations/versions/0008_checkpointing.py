"""Adds the level of checkpointing of a measurement."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Earlier measurements get null: their plan has the level."""
    column: sa.Column[str] = sa.Column("checkpointing", sa.String(16), nullable=True)
    op.add_column("measurement", column)


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("measurement", "checkpointing")
