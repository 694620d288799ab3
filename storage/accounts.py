"""What users of a service may have, and what they did: the store's accounts and audit trail."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from autofit.storage.models import AccountRow, AuditRow
from autofit.storage.searches import AuditRecord, Limits
from autofit.storage.store import Store

FIRST_UID = 400_001
"""The uid of the first user's scripts; systems give such numbers to nobody."""


class Accounts:
    """The accounts of a service's users; every method is one transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def limit(self, user: str, limits: Limits) -> None:
        """Store what a user may have from now on."""
        with self._store.writing() as session:
            row = account(session, user)
            row.gpus, row.priority = limits.gpus, limits.priority
            row.queued, row.upload_bytes = limits.queued, limits.upload_bytes

    def limits(self, user: str) -> Limits:
        """Return what a user may have."""
        with self._store.reading() as session:
            row = session.get(AccountRow, user)
            if row is None:
                return Limits()
            given = {"queued": row.queued, "upload_bytes": row.upload_bytes}
            kept = {name: value for name, value in given.items() if value is not None}
            return Limits(gpus=row.gpus, priority=row.priority, **kept)

    def uid(self, user: str) -> int:
        """Return the uid of a user's scripts; the first call chooses one that no other user has."""
        with self._store.writing() as session:
            row = account(session, user)
            if row.uid is None:
                last = session.scalar(select(func.max(AccountRow.uid)))
                row.uid = FIRST_UID if last is None else last + 1
            return row.uid

    def note(self, user: str, action: str, target: str, address: str = "") -> None:
        """Add a line to the audit trail."""
        with self._store.writing() as session:
            audit(session, user, action, target, address)

    def trail(self, user: str | None = None, *, most: int = 100) -> tuple[AuditRecord, ...]:
        """Return the newest lines of the audit trail, of one user or of all, the newest first."""
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(most)
        if user is not None:
            query = query.filter_by(user=user)
        with self._store.reading() as session:
            return tuple(map(AuditRow.record, session.scalars(query)))


def audit(session: Session, user: str, action: str, target: str, address: str) -> None:
    """Add a line to the audit trail, together with what it tells of."""
    row = AuditRow(user=user, action=action, target=target, address=address)
    row.created = datetime.now(UTC)
    session.add(row)


def account(session: Session, user: str) -> AccountRow:
    """Return the row of a user's account; make it if there is none."""
    row = session.get(AccountRow, user)
    if row is None:
        row = AccountRow(user=user, priority=0, gpu_seconds=0.0)
        session.add(row)
    return row
