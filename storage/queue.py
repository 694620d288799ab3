"""The queue of a service: the searches that users submitted, their notices, uploads and tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    ColumnElement,
    Text,
    cast,
    delete,
    exists,
    func,
    or_,
    select,
    type_coerce,
    update,
)
from sqlalchemy.orm import Session

from autofit.exceptions import UsageError
from autofit.storage import convert
from autofit.storage.accounts import account, audit
from autofit.storage.models import AccountRow, NoticeRow, SearchRow, TokenRow, TrialRow, UploadRow
from autofit.storage.owner import Owner
from autofit.storage.searches import (
    ACTIVE,
    ENDED,
    Counts,
    Limits,
    NoticeRecord,
    Outcome,
    SearchRecord,
    SearchState,
    Submission,
    TokenRecord,
)
from autofit.storage.store import Store, give_to, live_owner
from autofit.storage.turns import Reasons, next_numbers
from autofit.units import format_size
from autofit.worker.records.trials import Verdict

MOST_ATTEMPTS = 5
"""How often a search is taken up after its process was lost, before it fails."""


REPLACED = "NewOutput"
"""The kind of the notices of which only the newest of each slot is kept."""


class NoSuchSearch(UsageError):
    """There is no search with this number, or it is another user's."""


class OverQuota(UsageError):
    """A user has as much in the service already as is allowed."""


class Queue:
    """The searches of a service in a store; every method is one transaction.

    A search has an owner while it starts and runs: the process of its actor. The owner's lease is
    renewed by ``Store.heartbeat``. Methods raise ``StorageError`` as those of ``Store`` do, and
    ``UsageError`` for a search that does not exist or whose state does not allow the change.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    # --- for users ----------------------------------------------------------------------------

    def submit(
        self,
        user: str,
        submission: Submission,
        *,
        gpus: int = 1,
        priority: int = 0,
        deadline: datetime | None = None,
        key: str | None = None,
        limits: Limits | None = None,
        address: str = "",
    ) -> SearchRecord:
        """Add a search to the queue, and a line to the audit trail.

        ``gpus``: GPUs that it needs, 1 also on the CPU; ``deadline``: when it has to have ended;
        ``key``: the client's name of this submission: if the user's search with this key exists, it
        is returned. ``limits``: what the user may have; ``address``: the client's. Raises
        ``OverQuota`` if too many searches of the user wait, and ``UsageError`` if the submission's
        upload is not stored.
        """
        with self._store.writing() as session:
            if key is not None:
                again = session.scalar(select(SearchRow).filter_by(user=user, key=key))
                if again is not None:
                    return Reasons(session).record(again)
            if limits is not None:
                _check_queued(session, user, limits)
                if submission.upload is not None and not _has_upload(session, submission.upload):
                    raise UsageError(
                        f"there is no upload {submission.upload}: send the folder again"
                    )
            row = SearchRow(
                key=key,
                user=user,
                state=SearchState.QUEUED,
                submission=submission,
                subject=submission.subject,
                upload=submission.upload,
                gpus=gpus,
                priority=priority,
                deadline=deadline,
                attempts=0,
                created=_now(),
            )
            session.add(row)
            session.flush()
            audit(session, user, "submit", f"search {row.id}", address)
            return Reasons(session).record(row)

    def search(self, number: int, user: str | None = None) -> SearchRecord:
        """Return a search; with ``user``, only if it is that user's."""
        with self._store.reading() as session:
            return Reasons(session).record(_row(session, number, user))

    def searches(
        self,
        user: str,
        *,
        before: int | None = None,
        most: int = 100,
        script: str = "",
        state: SearchState | None = None,
        until: datetime | None = None,
    ) -> tuple[SearchRecord, ...]:
        """Return the newest searches of a user; with ``before``, those below that number.

        ``script``: a part of the words by which the script was named; ``until``: when the newest
        was submitted at the latest.
        """
        query = select(SearchRow).filter_by(user=user).order_by(SearchRow.id.desc()).limit(most)
        if before is not None:
            query = query.where(SearchRow.id < before)
        if script:
            words = type_coerce(SearchRow.submission, JSON)["script"]
            part = json.dumps(script)[1:-1]
            query = query.where(cast(words, Text).icontains(part, autoescape=True))
        if state is not None:
            query = query.where(SearchRow.state == state)
        if until is not None:
            query = query.where(SearchRow.created <= until)
        with self._store.reading() as session:
            return tuple(map(Reasons(session).record, session.scalars(query).all()))

    def running(self) -> tuple[SearchRecord, ...]:
        """Return the searches of all users that run, the oldest first."""
        query = (
            select(SearchRow).where(SearchRow.state == SearchState.RUNNING).order_by(SearchRow.id)
        )
        with self._store.reading() as session:
            return tuple(row.record() for row in session.scalars(query))

    def active(self, most: int | None = None) -> tuple[SearchRecord, ...]:
        """Return the searches of all users that start, run or wait, the oldest first.

        ``most``: so many at most; those that wait are left out first.
        """
        states = (SearchState.QUEUED, *ACTIVE)
        query = select(SearchRow).where(SearchRow.state.in_(states))
        query = query.order_by(SearchRow.state == SearchState.QUEUED, SearchRow.id).limit(most)
        with self._store.reading() as session:
            return tuple(map(Reasons(session).record, session.scalars(query).all()))

    def cancel(self, number: int, user: str, address: str = "") -> SearchRecord:
        """End a queued search; ask the actor of a running one to end it.

        ``address``: the client's, for the audit trail.
        """
        with self._store.writing() as session:
            row = _row(session, number, user)
            audit(session, user, "cancel", f"search {number}", address)
            if row.state == SearchState.QUEUED:
                _end(session, row, SearchState.CANCELLED)
            elif row.state in ENDED:
                raise UsageError(f"search {number} is {row.state}: there is nothing to cancel")
            row.cancelled = row.cancelled or _now()
            return row.record()

    def resume(
        self, number: int, user: str, address: str = "", limits: Limits | None = None
    ) -> SearchRecord:
        """Queue a failed or cancelled search again; it goes on from its finished trials.

        ``address`` and ``limits`` as for ``submit``.
        """
        with self._store.writing() as session:
            row = _row(session, number, user)
            if limits is not None:
                _check_queued(session, user, limits)
            audit(session, user, "resume", f"search {number}", address)
            if row.state not in (SearchState.FAILED, SearchState.CANCELLED):
                raise UsageError(
                    f"search {number} is {row.state}: only a failed or cancelled one can be resumed"
                )
            if row.upload is not None and not _has_upload(session, row.upload):
                raise UsageError(f"the folder of search {number} was deleted: submit it again")
            row.state, row.attempts = SearchState.QUEUED, 0
            row.cancelled = row.outcome = row.ended = None
            if row.deadline is not None and row.deadline <= _now():
                row.deadline = None
            session.flush()
            return Reasons(session).record(row)

    def counts(self) -> Counts:
        """Return what the store holds, by kind; each count reads an index."""
        short = select(TrialRow.out_of_memory).where(TrialRow.verdict == Verdict.OUT_OF_MEMORY)
        with self._store.reading() as session:
            searches = {str(each): _count(session, SearchRow.state == each) for each in SearchState}
            trials = {str(each): _count(session, TrialRow.verdict == each) for each in Verdict}
            phases = Counter(filter(None, session.scalars(short)))
            used = session.execute(select(AccountRow.user, AccountRow.gpu_seconds)).all()
            queued = select(func.min(SearchRow.created)).where(
                SearchRow.state == SearchState.QUEUED
            )
            held = select(func.sum(SearchRow.gpus)).where(SearchRow.state == SearchState.RUNNING)
            oldest, gpus = session.scalar(queued), session.scalar(held)
        return Counts(
            searches=searches,
            trials=trials,
            out_of_memory=phases,
            gpu_seconds={user: seconds for user, seconds in used},
            oldest=oldest,
            held=gpus or 0,
        )

    # --- for actors ---------------------------------------------------------------------------

    def claim(self, owner: Owner, runner: str) -> SearchRecord | None:
        """Give the next queued search to ``owner``, the actor ``runner``; ``None`` if none is next.

        The next is the first of ``turns.next_numbers``.
        """
        now = _now()
        with self._store.writing() as session:
            number = session.scalar(next_numbers(owner.host).limit(1))
            if number is None:
                return None
            row = _row(session, number)
            row.state, row.runner, row.waits_for = SearchState.STARTING, runner, None
            row.attempts += 1
            give_to(row, owner, now)
            return row.record()

    def claimable(self, host: str) -> bool:
        """Return whether ``claim`` by a process on ``host`` would return a search."""
        with self._store.reading() as session:
            return session.scalar(next_numbers(host).limit(1)) is not None

    def taken(self, runner: str) -> bool:
        """Return whether the actor ``runner`` has claimed a search."""
        with self._store.reading() as session:
            return (
                session.scalar(select(SearchRow.id).filter_by(runner=runner).limit(1)) is not None
            )

    def wait(self, search: SearchRecord, what: str) -> None:
        """Store what a starting search waits for."""
        self._set(search, waits_for=what)

    def run(self, search: SearchRecord) -> None:
        """Store that a search has its devices."""
        self._set(search, state=SearchState.RUNNING, waits_for=None, started=_now())

    def belongs_to(self, search: SearchRecord, study: str) -> None:
        """Store the study of a search."""
        self._set(search, study_id=study)

    def finish(self, search: SearchRecord, outcome: Outcome | None) -> None:
        """End a search of the calling process: with a plan, or with an error."""
        with self._store.writing() as session:
            row = _row(session, search.id)
            _end(session, row, SearchState.FINISHED if outcome is None else SearchState.FAILED)
            row.outcome = outcome

    def needs(self, search: SearchRecord, gpus: int) -> bool:
        """Store the GPUs that a starting search needs by its launch line.

        Returns whether it may go on. If its user would hold more GPUs than allowed, it goes back
        into the queue, or fails if it could never start.
        """
        with self._store.writing() as session:
            row = _row(session, search.id)
            row.gpus = gpus
            quota = account(session, row.user).gpus
            if quota is None:
                return True
            if gpus > quota:
                raise UsageError(
                    f"the launch line needs {gpus} GPUs, and {row.user} may hold {quota}"
                )
            others = select(func.coalesce(func.sum(SearchRow.gpus), 0)).where(
                SearchRow.user == row.user, SearchRow.state.in_(ACTIVE), SearchRow.id != row.id
            )
            if (session.scalar(others) or 0) + gpus <= quota:
                return True
            row.state, row.attempts = SearchState.QUEUED, row.attempts - 1
            return False

    def progress(self, search: SearchRecord) -> None:
        """Store that a trial of a search has ended: processes lost before no longer count."""
        self._set(search, attempts=1)

    def fail_next(self, host: str, reason: str) -> int | None:
        """End the next queued search, which no actor takes up; return its number."""
        with self._store.writing() as session:
            number: int | None = session.scalar(next_numbers(host).limit(1))
            if number is not None:
                row = _row(session, number)
                _end(session, row, SearchState.FAILED)
                row.outcome = Outcome(kind="WorkerError", message=reason)
            return number

    def stop(self, search: SearchRecord) -> None:
        """End a search of the calling process because its user has cancelled it."""
        with self._store.writing() as session:
            _end(session, _row(session, search.id), SearchState.CANCELLED)

    def reclaim(self) -> int:
        """Queue the active searches whose owner has ended; return how many there were.

        A cancelled one ends. One that has lost its process ``MOST_ATTEMPTS`` times fails.
        """
        now, count = _now(), 0
        active = select(SearchRow).where(SearchRow.state.in_(ACTIVE))
        with self._store.reading() as session:
            if all(live_owner(row, now) is not None for row in session.scalars(active)):
                return 0
        with self._store.writing() as session:
            for row in session.scalars(active):
                if live_owner(row, now) is not None:
                    continue
                count += 1
                if row.cancelled is not None:
                    _end(session, row, SearchState.CANCELLED)
                elif row.attempts >= MOST_ATTEMPTS:
                    _end(session, row, SearchState.FAILED)
                    message = (
                        f"the process of this search was lost {row.attempts} times:"
                        " look into the logs of Ray, then resume the search"
                    )
                    outcome = Outcome(kind="WorkerError", message=message)
                    row.outcome = outcome
                else:
                    _charge(session, row)
                    row.state, row.waits_for = SearchState.QUEUED, None
        return count

    def expire(self) -> int:
        """End the queued searches whose deadline has passed; return how many there were."""
        late = select(SearchRow).where(
            SearchRow.state == SearchState.QUEUED, SearchRow.deadline <= _now()
        )
        with self._store.reading() as session:
            if session.scalar(late.limit(1)) is None:
                return 0
        with self._store.writing() as session:
            rows = session.scalars(late).all()
            reasons = Reasons(session)
            for row, found in [(row, reasons.record(row)) for row in rows]:
                _end(session, row, SearchState.FAILED)
                outcome = Outcome(kind="UsageError", message=missed(found.waits_for))
                row.outcome = outcome
        return len(rows)

    # --- notices ------------------------------------------------------------------------------

    def tell(self, search: SearchRecord, notices: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Store notices of a search, each with its kind, in this order.

        One of the kind ``REPLACED`` takes the place of the one before of its slot.
        """
        number = search.id
        rows = [
            NoticeRow(search_id=number, kind=kind, content=convert.readable_json(content))
            for kind, content in notices
        ]
        with self._store.writing() as session:
            session.add_all(rows)
            session.flush()  # first: SQLite would give the new row the id of a deleted one
            for row in rows:
                if row.kind == REPLACED:
                    slot = type_coerce(NoticeRow.content, JSON)["slot"].as_integer()
                    same = [NoticeRow.kind == REPLACED, slot == row.content["slot"]]
                    before = [NoticeRow.search_id == number, NoticeRow.id < row.id]
                    session.execute(delete(NoticeRow).where(*before, *same))

    def notices(self, number: int, *, after: int = 0, most: int = 500) -> tuple[NoticeRecord, ...]:
        """Return the notices of a search with an id above ``after``, oldest first."""
        query = (
            select(NoticeRow)
            .where(NoticeRow.search_id == number, NoticeRow.id > after)
            .order_by(NoticeRow.id)
            .limit(most)
        )
        with self._store.reading() as session:
            return tuple(map(NoticeRow.record, session.scalars(query)))

    # --- uploads ------------------------------------------------------------------------------

    def add_upload(
        self,
        digest: str,
        content: bytes,
        user: str = "",
        *,
        limits: Limits | None = None,
        address: str = "",
    ) -> None:
        """Store an archive of a user; one that is stored already counts as new.

        ``limits``: what the user may have; ``address``: the client's, for the audit trail. Raises
        ``OverQuota`` if the user's archives would be too large together.
        """
        with self._store.writing() as session:
            audit(session, user, "upload", digest, address)
            others = select(func.sum(UploadRow.size)).where(
                UploadRow.user == user, UploadRow.digest != digest
            )
            if limits is not None:
                _check_bytes((session.scalar(others) or 0) + len(content), limits)
            if _has_upload(session, digest):
                again = update(UploadRow).where(UploadRow.digest == digest)
                session.execute(again.values(created=_now(), user=user))
            else:
                row = UploadRow(digest=digest, content=content, created=_now())
                row.user, row.size = user, len(content)
                session.add(row)

    def delete_uploads(self, before: datetime) -> int:
        """Delete the archives that were neither sent nor used since ``before``; return how many.

        A queued or active search uses its archive, and one that ended later than ``before`` did.
        """
        users = exists().where(
            SearchRow.upload == UploadRow.digest,
            or_(SearchRow.state.in_((SearchState.QUEUED, *ACTIVE)), SearchRow.ended >= before),
        )
        old = select(UploadRow.digest).where(UploadRow.created < before, ~users)
        with self._store.reading() as session:
            found = session.scalars(old).all()
        if found:
            with self._store.writing() as session:
                session.execute(delete(UploadRow).where(UploadRow.digest.in_(found), ~users))
        return len(found)

    def upload(self, digest: str) -> bytes:
        """Return an archive."""
        with self._store.reading() as session:
            content = session.scalar(select(UploadRow.content).filter_by(digest=digest))
        if content is None:
            raise UsageError(f"the folder {digest} is no longer stored: send it again")
        return content

    # --- tokens -------------------------------------------------------------------------------

    def add_token(self, user: str, digest: str, expires: datetime | None = None) -> None:
        """Store the digest of a user's new token; ``expires``: from when on it is refused."""
        with self._store.writing() as session:
            session.add(TokenRow(user=user, digest=digest, created=_now(), expires=expires))

    def tokens(self) -> tuple[TokenRecord, ...]:
        """Return all tokens, also those that are refused now, by user."""
        query = select(TokenRow).order_by(TokenRow.user, TokenRow.id)
        with self._store.reading() as session:
            return tuple(row.record() for row in session.scalars(query))

    def revoke(self, user: str, number: int | None = None) -> int:
        """Refuse a user's tokens from now on, or the one with this number; return how many.

        Their rows stay: a service without any token would be open to everybody.
        """
        late = or_(TokenRow.expires.is_(None), TokenRow.expires > _now())
        query = select(TokenRow).where(TokenRow.user == user, late)
        if number is not None:
            query = query.where(TokenRow.id == number)
        with self._store.writing() as session:
            found = session.scalars(query).all()
            for row in found:
                row.expires = _now()
        return len(found)

    def user_of(self, digest: str) -> str | None:
        """Return the user with this digest of a token; ``None`` if there is none or it is over."""
        late = or_(TokenRow.expires.is_(None), TokenRow.expires > _now())
        with self._store.reading() as session:
            return session.scalar(select(TokenRow.user).where(TokenRow.digest == digest, late))

    def users(self) -> tuple[str, ...]:
        """Return the names of the users that have, or had, a token."""
        with self._store.reading() as session:
            return tuple(session.scalars(select(TokenRow.user).distinct().order_by(TokenRow.user)))

    def _set(self, search: SearchRecord, **values: Any) -> None:
        with self._store.writing() as session:
            session.execute(update(SearchRow).where(SearchRow.id == search.id).values(**values))


def _row(session: Session, number: int, user: str | None = None) -> SearchRow:
    row = session.get(SearchRow, number)
    if row is None or (user is not None and row.user != user):
        raise NoSuchSearch(f"there is no search {number}")
    return row


def _check_queued(session: Session, user: str, limits: Limits) -> None:
    """Raise ``OverQuota`` if no more searches of a user may wait."""
    waiting = _count(session, (SearchRow.user == user) & (SearchRow.state == SearchState.QUEUED))
    if waiting >= limits.queued:
        raise OverQuota(
            f"{waiting} searches of {user} wait already, as many as may: cancel one, or try later"
        )


def _check_bytes(size: int, limits: Limits) -> None:
    if size > limits.upload_bytes:
        raise OverQuota(
            f"your folders would be {format_size(size)}, and you may have"
            f" {format_size(limits.upload_bytes)}: use --shared, or wait until old ones are deleted"
        )


def _count(session: Session, condition: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count()).where(condition)) or 0


def missed(waits_for: str) -> str:
    """Return the message for a search that still waits when its deadline comes."""
    what = f" for {waits_for}" if waits_for else ""
    return f"its deadline passed while it waited{what}: submit it again, with a later one"


def _end(session: Session, row: SearchRow, state: SearchState) -> None:
    _charge(session, row)
    row.state, row.ended, row.waits_for = state, _now(), None


def _charge(session: Session, row: SearchRow) -> None:
    """Add the time for which a running search has held its GPUs to the account of its user."""
    if row.state == SearchState.RUNNING and row.started is not None:
        held = (_now() - row.started).total_seconds() * row.gpus
        account(session, row.user).gpu_seconds += max(0.0, held)


def _has_upload(session: Session, digest: str) -> bool:
    return session.scalar(select(UploadRow.digest).filter_by(digest=digest)) is not None


def _now() -> datetime:
    return datetime.now(UTC)
