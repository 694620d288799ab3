"""Adds the settings that fitted in functions with ``@autofit.resilient``."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True)


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "fitted",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("key", JSON, nullable=False),
        sa.Column("kept", JSON, nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_fitted")),
        sa.UniqueConstraint("fingerprint", name=op.f("uq_fitted_fingerprint")),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("fitted")
