"""Which queued search of a service is next, and why another one waits."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

from sqlalchemy import Row, ScalarSelect, Select, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from autofit.storage.models import AccountRow, SearchRow
from autofit.storage.searches import ACTIVE, SearchRecord, SearchState


def next_numbers(host: str | None) -> Select[Any]:
    """Return the query for the numbers of the searches that may start now, the next one first.

    The next search has the highest priority. Among equals, the user with the fewest active searches
    comes first, then the earliest deadline, then the oldest search. Three things keep a search
    from starting. Another with the same subject is active. Its user would hold more GPUs than
    allowed. Another on ``host`` waits for its devices; ``None`` leaves this one out.
    """
    same, others, waiting = aliased(SearchRow), aliased(SearchRow), aliased(SearchRow)
    busy = (
        select(func.count())
        .select_from(others)
        .where(others.user == SearchRow.user, others.state.in_(ACTIVE))
        .scalar_subquery()
    )
    quota = select(AccountRow.gpus).where(AccountRow.user == SearchRow.user).scalar_subquery()
    query = select(SearchRow.id).where(
        SearchRow.state == SearchState.QUEUED,
        ~exists().where(same.subject == SearchRow.subject, same.state.in_(ACTIVE)),
        or_(quota.is_(None), _held() + SearchRow.gpus <= quota),
    )
    if host is not None:
        query = query.where(
            ~exists().where(waiting.state == SearchState.STARTING, waiting.owner_host == host)
        )
    return query.order_by(
        SearchRow.priority.desc(),
        busy,
        SearchRow.deadline.is_(None),
        SearchRow.deadline,
        SearchRow.id,
    )


def _held() -> ScalarSelect[int]:
    """Return the GPUs that the active searches of a search's user hold."""
    others = aliased(SearchRow)
    return (
        select(func.coalesce(func.sum(others.gpus), 0))
        .where(others.user == SearchRow.user, others.state.in_(ACTIVE))
        .scalar_subquery()
    )


class Reasons:
    """Why searches wait, in one transaction. Each table is read at most once."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def record(self, row: SearchRow) -> SearchRecord:
        """Return the record of a search, with what it waits for."""
        if row.state == SearchState.QUEUED:
            return row.record(self._of(row))
        return row.record()

    @cached_property
    def _places(self) -> dict[int, int]:
        """The searches that may start now, each with the number of those before it."""
        order = self._session.scalars(next_numbers(None))
        return {number: place for place, number in enumerate(order)}

    @cached_property
    def _active(self) -> list[Row[tuple[int, str, str, str, int]]]:
        columns = SearchRow.id, SearchRow.user, SearchRow.state, SearchRow.subject, SearchRow.gpus
        query = select(*columns).where(SearchRow.state.in_(ACTIVE)).order_by(SearchRow.id.desc())
        return list(self._session.execute(query))

    @cached_property
    def _subjects(self) -> dict[str, int]:
        return {each.subject: each.id for each in self._active}

    @cached_property
    def _held(self) -> Counter[str]:
        """GPUs that the active searches of each user hold."""
        held: Counter[str] = Counter()
        for each in self._active:
            held[each.user] += each.gpus
        return held

    @cached_property
    def _quotas(self) -> dict[str, int | None]:
        return {
            user: gpus
            for user, gpus in self._session.execute(select(AccountRow.user, AccountRow.gpus))
        }

    def _of(self, row: SearchRow) -> str:
        """Return what a queued search waits for; empty if it starts in a moment."""
        if (same := self._subjects.get(row.subject)) is not None:
            return f"search {same}, which searches the same script"
        quota, held = self._quotas.get(row.user), self._held[row.user]
        if quota is not None and held + row.gpus > quota:
            return f"GPUs of its user, who may hold {quota} and holds {held}"
        if before := self._places.get(row.id, 0):
            return f"its turn: {before} other{'s come' if before > 1 else ' comes'} first"
        starting = [each.id for each in self._active if each.state == SearchState.STARTING]
        return f"search {starting[-1]}, which starts before it" if starting else ""
