"""Adds the searches of the service, their notices, the uploads and the tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

STATES = "state IN ('queued', 'starting', 'running', 'finished', 'failed', 'cancelled')"


def upgrade() -> None:
    """Add the tables."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "search",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("user", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("submission", sa.JSON(), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("study_id", sa.String(32), nullable=True),
        sa.Column("runner", sa.String(32), nullable=True),
        sa.Column("waits_for", sa.Text(), nullable=True),
        sa.Column("cancelled", moment, nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=True),
        sa.Column("created", moment, nullable=False),
        sa.Column("started", moment, nullable=True),
        sa.Column("ended", moment, nullable=True),
        sa.Column("owner_host", sa.String(255), nullable=True),
        sa.Column("owner_pid", sa.Integer(), nullable=True),
        sa.Column("owner_started", sa.Double(), nullable=True),
        sa.Column("lease_until", moment, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_search"),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name="fk_search_study_id_study"),
        sa.CheckConstraint(STATES, name=op.f("ck_search_state")),
    )
    op.create_index("ix_search_state", "search", ["state", "id"])
    op.create_index("ix_search_subject", "search", ["subject", "state"])
    op.create_index("ix_search_user", "search", ["user", "id"])
    op.create_index("ix_search_user_state", "search", ["user", "state"])
    op.create_index("ix_search_study_id", "search", ["study_id"])
    op.create_index("ix_search_runner", "search", ["runner"])
    op.create_table(
        "notice",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("search_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_notice"),
        sa.ForeignKeyConstraint(["search_id"], ["search.id"], name="fk_notice_search_id_search"),
    )
    op.create_index("ix_notice_search_id", "notice", ["search_id", "id"])
    op.create_table(
        "upload",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("created", moment, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_upload"),
    )
    op.create_table(
        "token",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("user", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created", moment, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_token"),
        sa.UniqueConstraint("digest", name="uq_token_digest"),
    )


def downgrade() -> None:
    """Drop the tables."""
    for name in ("token", "upload", "notice", "search"):
        op.drop_table(name)
