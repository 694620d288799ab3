"""Adds the compile time of a measurement."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; earlier measurements did not compile, so they get 0."""
    column: sa.Column[float] = sa.Column(
        "compile_seconds", sa.Double(), nullable=False, server_default="0"
    )
    op.add_column("measurement", column)


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("measurement", "compile_seconds")
