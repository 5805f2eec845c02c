"""What a leader tells, and what its followers know by it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_pglock.beat.progress import Progress

NOON = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


def test_a_follower_knows_each_slot_that_it_is_told() -> None:
    leader, follower = Progress(), Progress()
    for name in ("report", "it's", 'a "b"', "ü", "sent until 2030"):
        follower.hear(leader.sent(name, NOON))
    assert follower.last == leader.last
    assert follower.until is None


@pytest.mark.parametrize("names", [[], ["report"], ["it's", 'a "b"'], ["a", "b", "c"]])
def test_a_newcomer_reads_all_in_the_leader_s_last_statement_whichever_that_is(names: list[str]) -> None:
    """In the middle of a tick, too: what was sent before it came nobody tells it again."""
    leader, newcomer = Progress(), Progress()
    leader.sent_until(NOON)
    words = str(leader)
    for name in names:
        words = leader.sent(name, NOON + SECOND)
    newcomer.read(statement(words))
    assert (newcomer.until, newcomer.last) == (leader.until, leader.last)


def test_a_newcomer_knows_nothing_where_all_is_too_much_to_tell() -> None:
    """And who listens knows each slot."""
    leader, follower, newcomer = Progress(), Progress(), Progress()
    leader.sent_until(NOON)
    words = ""
    for number in range(500):
        words = leader.sent(f"entry {number}", NOON + SECOND)
        follower.hear(words)
    assert follower.last == leader.last
    newcomer.read(statement(words))
    newcomer.read(statement(str(leader)))
    assert newcomer.until is None


def statement(words: str) -> str:
    return "NOTIFY \"pglock:1\", '{}'".format(words.replace("'", "''"))


@pytest.mark.parametrize("later", [True, False])
def test_what_is_known_is_never_unlearned(later: bool) -> None:
    """Words may come late, from a leader whose clock or whose knowledge is behind."""
    progress = Progress()
    for moment in [(NOON, NOON + SECOND), (NOON + SECOND, NOON)][later]:
        progress.sent_until(moment)
        progress.sent("report", moment + SECOND)
    assert progress.until == NOON + SECOND
    assert progress.last == {"report": NOON + 2 * SECOND}


def test_what_all_have_passed_is_forgotten() -> None:
    progress = Progress()
    progress.sent("report", NOON)
    progress.sent_until(NOON)
    assert progress.last == {}


def test_a_slot_too_long_to_tell_is_not_told() -> None:
    """The end of the tick tells it."""
    follower = Progress()
    follower.hear(Progress().sent("x" * 9000, NOON))
    assert follower.last == {}


@pytest.mark.parametrize("other", ["SELECT true", "", "<insufficient privilege>"])
def test_other_statements_say_nothing(other: str) -> None:
    progress = Progress()
    progress.read(other)
    assert (progress.until, progress.last) == (None, {})


@pytest.mark.parametrize(
    "words",
    [
        "{oops",
        "until 5",
        "5",
        "null",
        '["until"]',
        '{"entry": "a"}',
        '{"until": ""}',
        '{"until": false}',
        '{"until": 5}',
        '{"until": "soon"}',
        '{"until": "2026-01-01T00:00:00"}',
        '{"until": "2026-11-30T12:00:00+00:00", "sent": "a"}',
        '{"until": "2026-11-30T12:00:00+00:00", "sent": {"a": 5}}',
        '{"until": null, "sent": {"a": "2026-01-01T00:00:00"}}',
        '{"until": "2926-01-01T00:00:00+00:00", "sent": {}}',
        '{"until": null, "sent": {"a": "2926-01-01T00:00:00+00:00"}}',
        "[" * 7900,
    ],
    ids=lambda words: words[:40],
)
def test_what_nobody_understands_says_nothing(words: str) -> None:
    """Whoever may connect may tell it. Without a time zone it could be compared with no other note, and one
    from the future would keep every beat from sending until then.
    """
    progress = Progress()
    progress.hear(words)
    assert (progress.until, progress.last) == (None, {})
    progress.sent_until(NOON)
    progress.hear(words)
    assert (progress.until, progress.last) == (NOON, {})
