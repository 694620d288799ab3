"""Adds the number of failed allocations that did not end the step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; earlier versions did not count them, so old rows get 0."""
    column: sa.Column[int] = sa.Column(
        "allocations_refused", sa.Integer(), nullable=False, server_default="0"
    )
    op.add_column("measurement", column)


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("measurement", "allocations_refused")
