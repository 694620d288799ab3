"""Adds the peak memory of each rank."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; earlier measurements had one rank, so they get an empty list."""
    column: sa.Column[list[int]] = sa.Column(
        "rank_peaks", sa.JSON(), nullable=False, server_default="[]"
    )
    op.add_column("measurement", column)


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("measurement", "rank_peaks")
