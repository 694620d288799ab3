"""Makes the tables.

They are those of ``models.py`` as long as no version of autofit was released. The first change
after a release writes out here what that release had, and gets a revision of its own.
"""

from __future__ import annotations

from alembic import op

from autofit.storage.models import Base

revision = "1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    Base.metadata.create_all(op.get_bind(), checkfirst=False)


def downgrade() -> None:
    """Drop the tables."""
    Base.metadata.drop_all(op.get_bind())
