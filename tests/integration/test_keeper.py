"""Holds on a real server, judged by another session."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable

import psycopg
import pytest

from celery_pglock import LockId, LockLost, LockUnavailable
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper
from celery_pglock.locks.keys import id_of
from celery_pglock.locks.line import close_warm
from celery_pglock.locks.process import name_this_process
from celery_pglock.locks.requests import Answer
from celery_pglock.locks.settings import Settings
from celery_pglock.locks.transaction import Transaction
from integration.judge import Judge, eventually
from localservers import PostgreSQL

ID = LockId(-42)
EXECUTION = LockId(7)

pytestmark = pytest.mark.usefixtures("way")


def acquired(keeper: Keeper, id: LockId = ID) -> Hold:
    hold = Hold(id)
    assert keeper.acquire(hold).answer is Answer.GRANTED
    return hold


@pytest.mark.parametrize(
    "id",
    [LockId(0), LockId(-1), LockId(2**63 - 1), LockId(-(2**63)), LockId(1, 2), LockId(-1, -(2**31))],
    ids=repr,
)
def test_a_hold_is_a_lock_on_the_server_until_it_is_released(
    keeper: Keeper, judge: Judge, id: LockId
) -> None:
    """What is acquired is in `pg_locks` under the id that was meant, and gone after the release."""
    hold = acquired(keeper, id)
    assert judge.held() == {id}
    assert judge.locks()[0][1] in judge.sessions()
    keeper.release(hold)
    assert judge.held() == set()
    assert (hold.status, hold.lost) == (Hold.Status.RELEASED, False)


def test_a_held_name_is_a_conflict_for_another_process(
    new_keeper: Callable[..., Keeper], judge: Judge
) -> None:
    """Of two sessions one holds, and the other is told so at once."""
    first, second = new_keeper(), new_keeper()
    hold = acquired(first)
    late = Hold(ID)
    assert second.acquire(late).answer is Answer.CONFLICT
    assert late.status is Hold.Status.NEW
    second.release(late)
    assert judge.held() == {ID}
    first.release(hold)
    second.release(acquired(second))


def test_a_held_name_is_a_conflict_inside_the_process(keeper: Keeper, judge: Judge) -> None:
    """Locks stack inside a session: the server would grant it a second time."""
    hold = acquired(keeper)
    late = Hold(ID)
    assert keeper.acquire(late).answer is Answer.CONFLICT
    keeper.release(late)
    assert judge.held() == {ID}
    keeper.release(hold)
    assert judge.held() == set()


def test_all_holds_of_a_process_share_one_session(keeper: Keeper, judge: Judge) -> None:
    """One connection for each process, whatever it holds."""
    holds = [acquired(keeper, LockId(n)) for n in range(20)]
    assert len(judge.locks()) == 20
    # The one that proved exclusion is on its way out.
    eventually(lambda: len(judge.sessions()) == 1, "one session")
    for hold in holds:
        keeper.release(hold)
    assert judge.locks() == []


def test_releasing_what_is_not_held_does_nothing(keeper: Keeper, judge: Judge) -> None:
    """A release belongs to one acquisition: twice, early and of a stranger's are all the same to it."""
    keeper.release(Hold(ID))
    assert judge.sessions() == []
    old = acquired(keeper)
    keeper.release(old)
    new = acquired(keeper)
    keeper.release(old)
    keeper.release_soon(old)
    keeper.release(Hold(ID))
    assert judge.held() == {ID}
    keeper.release(new)
    assert judge.held() == set()
    assert not old.lost


def test_the_two_key_spaces_do_not_meet(new_keeper: Callable[..., Keeper], judge: Judge) -> None:
    """One 64-bit key and the pair with the same bits are two locks."""
    first, second = new_keeper(), new_keeper()
    one, pair = acquired(first, LockId(5)), acquired(second, LockId(0, 5))
    assert judge.held() == {LockId(5), LockId(0, 5)}
    first.release(one)
    second.release(pair)


def test_another_program_excludes_and_is_excluded(keeper: Keeper, judge: Judge) -> None:
    """Plain SQL on the same id takes part."""
    judge.take(LockId(1, 2))
    assert keeper.acquire(Hold(LockId(1, 2))).answer is Answer.CONFLICT
    judge.give_back()
    hold = acquired(keeper, LockId(1, 2))
    assert not judge.take(LockId(1, 2))
    keeper.release(hold)


def test_the_id_of_a_name_is_the_one_that_sql_computes(observer: psycopg.Connection) -> None:
    """Anyone can compute the id of a name by the documented line."""
    names = [f"celery:shop.train:tenant:{n}" for n in range(500)] + ["", "é→", "a'b\\c", "x" * 10_000]
    computed = observer.execute(
        "SELECT ('x' || encode(substring(sha256(convert_to(name, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint"
        " FROM unnest(%s::text[]) WITH ORDINALITY AS names (name, n) ORDER BY n",
        [names],
    ).fetchall()
    ids = [tuple(id_of(name)) for name in names]
    assert computed == ids
    assert min(ids) < (0,) < max(ids)


@pytest.mark.parametrize(("host", "shown"), [("host", "host"), ("größe", "gr??e")], ids=["ascii", "other"])
def test_application_name_says_whose_session_it_is(
    keeper: Keeper, judge: Judge, monkeypatch: pytest.MonkeyPatch, host: str, shown: str
) -> None:
    """The worker's name and the process id, cut so that the id stays, in whatever letters."""
    monkeypatch.setattr("celery_pglock.locks.process._name", "")
    name_this_process("celery@" + host * 30)
    hold = acquired(keeper)
    (row,) = judge.observer.execute(
        "SELECT application_name FROM pg_stat_activity WHERE pid = %s", [judge.holder(ID)]
    )
    assert row[0].startswith(f"pglock celery@{shown}{shown}")
    assert row[0].endswith(f" {os.getpid()}")
    keeper.release(hold)


def test_loss_is_noticed_however_far_off_all_else_is(
    new_keeper: Callable[..., Keeper], judge: Judge, postgres: PostgreSQL, dbname: str
) -> None:
    """Over a local socket nothing else is to be done in between."""
    keeper = new_keeper(postgres.socket_url(dbname), failover_timeout=1e9)
    hold = acquired(keeper)
    lingers = Hold(EXECUTION, min_hold=1e9)
    keeper.acquire(lingers)
    keeper.release(lingers)
    judge.end(judge.holder(ID))
    eventually(lambda: hold.lost, "the loss was not noticed")


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_holder_is_told_with_how_long_he_has_it_at_least(
    new_keeper: Callable[..., Keeper], dsn: str, scope: str
) -> None:
    """A question for signs of life in between does not make the hold look young."""
    settings = Settings(dsn, loss_timeout=3.0)
    keeper = new_keeper(dsn, loss_timeout=3.0)
    holder: Keeper | Transaction = keeper if scope == "session" else Transaction(settings)
    hold = Hold(ID)
    began = time.monotonic()
    assert holder.acquire(hold).answer is Answer.GRANTED
    for asker in (new_keeper(), Transaction(settings)):
        time.sleep(1.6)
        assert asker.acquire(Hold(ID)).answer is Answer.CONFLICT
        found = asker.holder_of(ID)
        assert found is not None
        assert str(os.getpid()) in found.words
        took = time.monotonic() - began
        # A sign of life tells whole seconds.
        assert took - 1.5 <= found.held_for <= took
    holder.release(hold)
    close_warm()


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_who_has_waited_does_not_hold_since_then(
    new_keeper: Callable[..., Keeper], observer: psycopg.Connection, dsn: str, scope: str
) -> None:
    """His statement, and his transaction, have begun with the wait."""
    settings = Settings(dsn, loss_timeout=3.0)
    waiter: Keeper | Transaction = (
        Keeper(settings, shared=False) if scope == "session" else Transaction(settings)
    )
    hold, asker = Hold(ID), new_keeper()
    observer.execute("SELECT pg_advisory_lock(%s)", [ID[0]])
    waits = threading.Thread(target=waiter.wait, args=(hold, None))
    waits.start()
    time.sleep(3.0)
    free = time.monotonic()
    observer.execute("SELECT pg_advisory_unlock(%s)", [ID[0]])
    waits.join()
    for seconds in (0.0, 1.6):
        time.sleep(seconds)
        found = asker.holder_of(ID)
        assert found is not None
        assert found.held_for <= time.monotonic() - free
    waiter.release(hold)
    close_warm()


@pytest.mark.parametrize("seconds", ["5000", "99999999999999"])
@pytest.mark.parametrize("text", ["SELECT {} -- quiet for {} s", "/**/ SELECT {} /* quiet for {} s */"])
def test_what_other_programs_say_is_no_sign_of_life(
    new_keeper: Callable[..., Keeper], observer: psycopg.Connection, text: str, seconds: str
) -> None:
    observer.execute(text.format("pg_advisory_lock(-42)", seconds))
    found = new_keeper().holder_of(ID)
    assert found is not None
    assert found.held_for < 60
    observer.execute("SELECT pg_advisory_unlock_all()")


def test_a_holder_that_cannot_be_read_costs_no_lock(
    new_keeper: Callable[..., Keeper], observer: psycopg.Connection, dsn: str
) -> None:
    """In some encodings half a letter is a backslash, and in others there is no such letter."""
    observer.execute("SELECT pg_advisory_lock(-42) /* \u8868 */")
    for encoding in ("SJIS", "LATIN1"):
        asker = new_keeper(f"{dsn}?client_encoding={encoding}")
        hold = acquired(asker, LockId(1))
        assert asker.holder_of(ID) is None
        assert not hold.lost
        asker.release(hold)
    observer.execute("SELECT pg_advisory_unlock_all()")


def test_holder_whose_statements_are_hidden_is_told_without_an_age(
    new_keeper: Callable[..., Keeper], postgres: PostgreSQL, dbname: str
) -> None:
    """A role sees the statements of its own sessions alone."""
    keeper = new_keeper()
    hold = acquired(keeper)
    name = f"user_{uuid.uuid4().hex[:12]}"
    postgres.execute(f"CREATE ROLE {name} LOGIN")
    other = new_keeper(postgres.url(dbname, name))
    assert other.acquire(Hold(ID)).answer is Answer.CONFLICT
    found = other.holder_of(ID)
    assert found is not None
    assert str(os.getpid()) in found.words
    assert found.held_for is None
    keeper.release(hold)
    other.close()
    postgres.execute(f"DROP ROLE {name}")


# The identity of an execution.


def test_an_identity_is_kept_until_it_is_released_itself(keeper: Keeper, judge: Judge) -> None:
    """It outlives the hold, since the result is not stored yet."""
    hold, identity = Hold(ID), Hold(EXECUTION)
    assert keeper.acquire(hold, identity).answer is Answer.GRANTED
    assert judge.held() == {ID, EXECUTION}
    keeper.release(hold)
    assert judge.held() == {EXECUTION}
    keeper.release_soon(identity)
    eventually(lambda: not judge.held(), "the identity is still held", within=1)


def test_an_owed_unlock_is_paid_within_a_second(keeper: Keeper, judge: Judge) -> None:
    """Without any further statement that it could ride on, again and again."""
    for _ in range(3):
        hold = acquired(keeper)
        keeper.release_soon(hold)
        asked_at = time.monotonic()
        eventually(lambda: not judge.held(), "the unlock is still owed", within=1)
        assert time.monotonic() - asked_at < 1
        assert not hold.lost


def test_an_owed_unlock_is_no_conflict_for_the_next_question(keeper: Keeper, judge: Judge) -> None:
    """Whoever asks the same session next finds the name free."""
    keeper.release_soon(acquired(keeper))
    hold = acquired(keeper)
    assert judge.held() == {ID}
    keeper.release(hold)
    assert judge.held() == set()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_execution_that_is_under_way_is_told_from_a_conflict(
    new_keeper: Callable[..., Keeper], judge: Judge, elsewhere: bool
) -> None:
    """A second delivery meets its own identity, in this process or in another."""
    first = new_keeper()
    second = new_keeper() if elsewhere else first
    hold, identity = Hold(ID), Hold(EXECUTION)
    first.acquire(hold, identity)
    again, copy = Hold(ID), Hold(EXECUTION)
    assert second.acquire(again, copy).answer is Answer.SAME_EXECUTION
    second.release(again)
    second.release_soon(copy)
    # With the body done and the result not stored yet it is the same still.
    first.release(hold)
    assert second.acquire(Hold(ID), Hold(EXECUTION)).answer is Answer.SAME_EXECUTION
    assert judge.held() == {EXECUTION}
    first.release_soon(identity)
    eventually(lambda: not judge.held(), "the identity is still held", within=1)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_identity_is_held_after_a_conflict_too(
    new_keeper: Callable[..., Keeper], judge: Judge, elsewhere: bool
) -> None:
    """The skipped execution is about to store its marker."""
    keeper = new_keeper()
    holder = new_keeper() if elsewhere else keeper
    hold = acquired(holder)
    identity = Hold(EXECUTION)
    assert keeper.acquire(Hold(ID), identity).answer is Answer.CONFLICT
    assert judge.held() == {ID, EXECUTION}
    keeper.release_soon(identity)
    holder.release(hold)
    eventually(lambda: not judge.held(), "the identity is still held", within=1)


# Threads.


def race(bodies: int, body: Callable[[int], None]) -> None:
    """Run a body on many threads at once; the first error of one is raised."""
    start, errors = threading.Barrier(bodies), []

    def run(n: int) -> None:
        try:
            start.wait(10)
            body(n)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


class Room:
    """Counts who is inside, and who met another there."""

    def __init__(self) -> None:
        self.inside: list[int] = []
        self.visits = self.collisions = 0

    def visit(self, who: int) -> None:
        self.inside.append(who)
        self.visits += 1
        time.sleep(0.0005)
        self.collisions += self.inside != [who]
        self.inside.remove(who)


@pytest.mark.parametrize("locked", [True, False])
def test_two_threads_never_hold_one_name(keeper: Keeper, judge: Judge, locked: bool) -> None:
    """Eight threads that share a session run one at a time; without the lock they collide."""
    room = Room()

    def body(n: int) -> None:
        for _ in range(30):
            hold = Hold(ID)
            if not locked or keeper.acquire(hold).answer is Answer.GRANTED:
                room.visit(n)
                keeper.release(hold)

    race(8, body)
    assert room.visits
    assert bool(room.collisions) is not locked
    assert judge.held() == set()


def test_two_processes_never_hold_one_name(new_keeper: Callable[..., Keeper], judge: Judge) -> None:
    """The same between sessions."""
    room, keepers = Room(), [new_keeper() for _ in range(4)]

    def body(n: int) -> None:
        for _ in range(30):
            hold = Hold(ID)
            if keepers[n % 4].acquire(hold).answer is Answer.GRANTED:
                room.visit(n)
                keepers[n % 4].release(hold)

    race(8, body)
    assert room.visits
    assert not room.collisions


def test_closing_leaves_a_session_alone_that_somebody_works_under(keeper: Keeper, judge: Judge) -> None:
    """A body that still runs keeps its lock; an idle session goes, with what it owes."""
    hold = acquired(keeper)
    keeper.close()
    assert judge.held() == {ID}
    keeper.release(hold)
    keeper.close()
    eventually(lambda: not judge.sessions(), "the session is still open", within=1)
    keeper.release(acquired(keeper))


# A lost session.


def test_a_lock_is_lost_with_its_backend(keeper: Keeper, judge: Judge) -> None:
    """The hold says so soon, and by itself."""
    hold = acquired(keeper)
    hold.check()
    judge.end(judge.holder(ID))
    eventually(lambda: hold.lost, "the loss was not noticed", within=1)
    with pytest.raises(LockLost):
        hold.check()
    assert judge.held() == set()


def test_a_release_that_finds_the_backend_gone_is_a_loss(keeper: Keeper, judge: Judge) -> None:
    """Whoever notices first, the hold was lost and never counts as released."""
    hold = acquired(keeper)
    judge.end(judge.holder(ID))
    keeper.release(hold)
    assert hold.status is Hold.Status.LOST


def test_an_unlock_that_answers_false_is_a_loss(keeper: Keeper, judge: Judge) -> None:
    """As after `DISCARD ALL` by a pooler: the session lives and the lock is gone."""
    hold = acquired(keeper)
    keeper._session._query("SELECT pg_advisory_unlock_all()")
    assert judge.held() == set()
    keeper.release(hold)
    with pytest.raises(LockLost, match="did not know it"):
        hold.check()


def test_a_new_session_serves_after_a_lost_one(keeper: Keeper, judge: Judge) -> None:
    """A backend that ended between two tasks costs nothing."""
    for _ in range(5):
        hold = acquired(keeper)
        pid = judge.holder(ID)
        keeper.release(hold)
        judge.end(pid)
    hold = acquired(keeper)
    assert judge.held() == {ID}
    keeper.release(hold)


def test_a_new_session_does_not_bring_a_lost_hold_back(keeper: Keeper, judge: Judge) -> None:
    """Reconnecting never counts as still holding, and a late release frees nobody else's lock."""
    lost = acquired(keeper)
    judge.end(judge.holder(ID))
    # Until it is known the name is taken by this very process.
    eventually(lambda: lost.lost, "the loss was not noticed", within=1)
    new = acquired(keeper)
    keeper.release(lost)
    assert judge.held() == {ID}
    keeper.release(new)
    assert lost.lost
    assert not new.lost


def test_every_hold_of_a_lost_session_is_lost(keeper: Keeper, judge: Judge) -> None:
    """All that one session carried, identities too."""
    hold, identity, other = Hold(ID), Hold(EXECUTION), Hold(LockId(1, 2))
    keeper.acquire(hold, identity)
    keeper.acquire(other)
    judge.end(judge.holder(ID))
    eventually(lambda: hold.lost and identity.lost and other.lost, "the loss was not noticed", within=1)


def test_a_server_that_is_not_there_is_no_conflict(new_keeper: Callable[..., Keeper]) -> None:
    """Could not ask is never taken for somebody else holds it; the attempt is bounded."""
    keeper = new_keeper("postgresql://127.0.0.1:1/nowhere")
    asked = keeper.acquire(Hold(ID))
    assert asked.answer is Answer.UNKNOWN
    assert isinstance(asked.error, LockUnavailable)
