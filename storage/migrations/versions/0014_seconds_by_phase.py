"""Adds the seconds of studies and trials by phase, and which measurements are probes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; nothing is known of earlier trials, so they get an empty object."""
    for table in ("study", "trial"):
        column: sa.Column[dict[str, float]] = sa.Column(
            "seconds_by_phase", sa.JSON(), nullable=False, server_default="{}"
        )
        op.add_column(table, column)
    op.add_column(
        "measurement",
        sa.Column("probed", sa.Boolean(), nullable=False, server_default=sa.false()),
    )


def downgrade() -> None:
    """Drop the columns."""
    op.drop_column("measurement", "probed")
    for table in ("trial", "study"):
        op.drop_column(table, "seconds_by_phase")
