"""Which queued search of a service is next, and why another one waits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sqlalchemy import ScalarSelect, Select, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from autofit.storage.models import Account, Search
from autofit.storage.searches import ACTIVE, SearchRecord, SearchState


def next_numbers(host: str | None) -> Select[Any]:
    """Return the query for the numbers of the searches that may start now, the next one first.

    The next search has the highest priority. Among equals, the user with the fewest active searches
    comes first, then the earliest deadline, then the oldest search. Three things keep a search
    from starting. Another with the same subject is active. Its user would hold more GPUs than
    allowed. Another on ``host`` waits for its devices; ``None`` leaves this one out.
    """
    same, others, waiting = aliased(Search), aliased(Search), aliased(Search)
    busy = (
        select(func.count())
        .select_from(others)
        .where(others.user == Search.user, others.state.in_(ACTIVE))
        .scalar_subquery()
    )
    quota = select(Account.gpus).where(Account.user == Search.user).scalar_subquery()
    query = select(Search.id).where(
        Search.state == SearchState.QUEUED,
        ~exists().where(same.subject == Search.subject, same.state.in_(ACTIVE)),
        or_(quota.is_(None), _held() + Search.gpus <= quota),
    )
    if host is not None:
        query = query.where(
            ~exists().where(waiting.state == SearchState.STARTING, waiting.owner_host == host)
        )
    return query.order_by(
        Search.priority.desc(), busy, Search.deadline.is_(None), Search.deadline, Search.id
    )


def _held() -> ScalarSelect[int]:
    """Return the GPUs that the active searches of a search's user hold."""
    others = aliased(Search)
    return (
        select(func.coalesce(func.sum(others.gpus), 0))
        .where(others.user == Search.user, others.state.in_(ACTIVE))
        .scalar_subquery()
    )


class Reasons:
    """Why searches wait, in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def record(self, row: Search) -> SearchRecord:
        """Return the record of a search, with what it waits for."""
        if row.state == SearchState.QUEUED:
            return row.record(self._of(row))
        return row.record()

    @cached_property
    def _order(self) -> Sequence[int]:
        return self._session.scalars(next_numbers(None)).all()

    def _of(self, row: Search) -> str:
        """Return what a queued search waits for; empty if it starts in a moment."""
        one = select(Search.id).where(Search.state.in_(ACTIVE)).limit(1)
        same = self._session.scalar(one.where(Search.subject == row.subject))
        if same is not None:
            return f"search {same}, which searches the same script"
        quota = self._session.scalar(select(Account.gpus).where(Account.user == row.user))
        mine = select(func.coalesce(func.sum(Search.gpus), 0))
        mine = mine.where(Search.user == row.user, Search.state.in_(ACTIVE))
        held = self._session.scalar(mine) or 0
        if quota is not None and held + row.gpus > quota:
            return f"GPUs of its user, who may hold {quota} and holds {held}"
        before = self._order.index(row.id) if row.id in self._order else 0
        if before:
            return f"its turn: {before} other{'s come' if before > 1 else ' comes'} first"
        first = self._session.scalar(one.where(Search.state == SearchState.STARTING))
        return "" if first is None else f"search {first}, which starts before it"
