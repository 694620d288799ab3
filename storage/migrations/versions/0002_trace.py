"""Adds the trace of the reference trial."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("trial", sa.Column("trace", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("trial", "trace")
