"""Adds limits of users, an audit trail, and the priority, deadline and GPUs of searches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables and columns."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "account",
        sa.Column("user", sa.String(64), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("uid", sa.Integer(), nullable=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("user", name="pk_account"),
        sa.UniqueConstraint("uid", name="uq_account_uid"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("user", sa.String(64), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("created", moment, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_user", "audit", ["user", "id"])
    op.add_column("search", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("search", sa.Column("deadline", moment, nullable=True))
    op.add_column("search", sa.Column("gpus", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("search", sa.Column("upload", sa.String(64), nullable=True))
    _fill_uploads()
    op.create_index("ix_search_upload", "search", ["upload", "state"])
    op.create_index("ix_upload_created", "upload", ["created"])


def _fill_uploads() -> None:
    table = sa.table(
        "search", sa.column("id"), sa.column("submission", sa.JSON()), sa.column("upload")
    )
    connection = op.get_bind()
    for number, found in connection.execute(sa.select(table.c.id, table.c.submission)).all():
        connection.execute(
            table.update().where(table.c.id == number).values(upload=found.get("upload"))
        )


def downgrade() -> None:
    """Drop the tables and columns."""
    op.drop_index("ix_upload_created", "upload")
    op.drop_index("ix_search_upload", "search")
    for name in ("upload", "gpus", "deadline", "priority"):
        op.drop_column("search", name)
    op.drop_table("audit")
    op.drop_table("account")
