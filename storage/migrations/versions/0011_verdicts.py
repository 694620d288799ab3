"""Adds an index of trials by verdict, for the metrics of the service."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index."""
    op.create_index("ix_trial_verdict", "trial", ["verdict"])


def downgrade() -> None:
    """Drop the index."""
    op.drop_index("ix_trial_verdict", "trial")
