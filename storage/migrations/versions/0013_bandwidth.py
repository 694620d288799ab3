"""Adds how fast the ranks of a machine communicate."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "bandwidth",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("gpu", sa.String(255), nullable=False),
        sa.Column("link", sa.String(16), nullable=False),
        sa.Column("torch", sa.String(64), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("all_reduce", sa.Double(), nullable=False),
        sa.Column("all_gather", sa.Double(), nullable=False),
        sa.Column("reduce_scatter", sa.Double(), nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_bandwidth"),
        sa.UniqueConstraint(
            "gpu", "link", "torch", "ranks", name="uq_bandwidth_gpu_link_torch_ranks"
        ),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("bandwidth")
