"""Adds which of equally fast plans a study's last search preferred."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; earlier searches preferred the plan that changes least."""
    column: sa.Column[str] = sa.Column(
        "prefer", sa.String(16), nullable=False, server_default="fidelity"
    )
    op.add_column("study", column)


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("study", "prefer")
