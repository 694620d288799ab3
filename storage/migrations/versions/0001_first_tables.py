"""Creates the first tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True)
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the tables."""
    _study()
    _trial()
    _measurement()
    _event()


def downgrade() -> None:
    """Drop the tables."""
    for name in ("event", "measurement", "trial", "study"):
        op.drop_table(name)


def _held() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("owner_host", sa.String(255)),
        sa.Column("owner_pid", sa.Integer()),
        sa.Column("owner_started", sa.Double()),
        sa.Column("lease_until", MOMENT),
    )


def _study() -> None:
    op.create_table(
        "study",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("script_path", sa.Text(), nullable=False),
        sa.Column("key", JSON, nullable=False),
        sa.Column("script", JSON, nullable=False),
        sa.Column("hardware", JSON, nullable=False),
        sa.Column("budget", sa.BigInteger(), nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("facts", JSON),
        sa.Column("left_out", JSON, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("launches", sa.Integer(), nullable=False),
        sa.Column("created", MOMENT, nullable=False),
        sa.Column("opened", MOMENT, nullable=False),
        *_held(),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_study")),
        sa.UniqueConstraint(
            "fingerprint", "generation", name=op.f("uq_study_fingerprint_generation")
        ),
    )


def _trial() -> None:
    op.create_table(
        "trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("plan", JSON, nullable=False),
        sa.Column("finished_plan", sa.String(64)),
        sa.Column("launch", sa.Integer(), nullable=False),
        sa.Column("budget", sa.BigInteger(), nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("optuna_number", sa.Integer()),
        sa.Column("created", MOMENT, nullable=False),
        sa.Column("ended", MOMENT),
        sa.Column("position", sa.Integer()),
        sa.Column("verdict", sa.String(32)),
        sa.Column("reason", sa.Text()),
        sa.Column("best", JSON),
        sa.Column("out_of_memory", JSON),
        sa.Column("blamed", sa.String(64)),
        sa.Column("traceback", sa.Text()),
        sa.Column("startup_seconds", sa.Double()),
        *_held(),
        sa.CheckConstraint(
            "state IN ('running', 'finished', 'interrupted')", name=op.f("ck_trial_state")
        ),
        sa.CheckConstraint("purpose IN ('search', 'confirm')", name=op.f("ck_trial_purpose")),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_trial_study_id_study")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trial")),
        sa.UniqueConstraint("study_id", "number", name=op.f("uq_trial_study_id_number")),
        sa.UniqueConstraint(
            "study_id", "finished_plan", name=op.f("uq_trial_study_id_finished_plan")
        ),
    )


def _measurement() -> None:
    op.create_table(
        "measurement",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("micro_batch", sa.Integer(), nullable=False),
        sa.Column("effective_batch", sa.Integer(), nullable=False),
        sa.Column("step_seconds", JSON, nullable=False),
        sa.Column("peak_allocated", sa.BigInteger(), nullable=False),
        sa.Column("peak_reserved", sa.BigInteger(), nullable=False),
        sa.Column("peak_device", sa.BigInteger(), nullable=False),
        sa.Column("allocation_retries", sa.Integer(), nullable=False),
        sa.Column("data_wait", sa.Double(), nullable=False),
        sa.Column("losses", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["trial.id"], name=op.f("fk_measurement_trial_id_trial")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurement")),
        sa.UniqueConstraint("trial_id", "position", name=op.f("uq_measurement_trial_id_position")),
    )


def _event() -> None:
    op.create_table(
        "event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("payload", JSON, nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("study_id", sa.String(32)),
        sa.Column("trial_id", sa.Integer()),
        sa.Column("created", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_event_study_id_study")),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name=op.f("fk_event_trial_id_trial")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
    )
