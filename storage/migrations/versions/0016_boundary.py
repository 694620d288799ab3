"""Adds keys of submissions, ends of tokens, and quotas of the queue and of uploads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; an upload that is stored already counts as nobody's."""
    op.add_column("search", sa.Column("key", sa.String(64), nullable=True))
    op.create_index("ix_search_key", "search", ["user", "key"], unique=True)
    op.add_column("token", sa.Column("expires", sa.DateTime(timezone=True), nullable=True))
    op.add_column("account", sa.Column("queued", sa.Integer(), nullable=True))
    op.add_column("account", sa.Column("upload_bytes", sa.BigInteger(), nullable=True))
    op.add_column("upload", sa.Column("user", sa.String(64), nullable=True))
    size: sa.Column[int] = sa.Column("size", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("upload", size)
    op.create_index("ix_upload_user", "upload", ["user"])


def downgrade() -> None:
    """Drop the columns."""
    op.drop_index("ix_upload_user", "upload")
    op.drop_index("ix_search_key", "search")
    for table, name in (
        *(("upload", "size"), ("upload", "user")),
        *(("account", "upload_bytes"), ("account", "queued")),
        *(("token", "expires"), ("search", "key")),
    ):
        op.drop_column(table, name)
