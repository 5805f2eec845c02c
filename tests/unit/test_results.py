"""Whose result a stored one is, by the times that backends tell."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from celery.app.task import Context

from celery_pglock.delivery import HEADER, was_stored_before

ETA = "2026-03-01T12:00:00.500000+00:00"


@pytest.mark.parametrize(
    ("done", "before"),
    [
        ("2026-03-01T12:00:00.499999", True),  # Celery 5.3
        ("2026-03-01T12:00:00.500001", False),
        ("2026-03-01T13:00:00.499999+01:00", True),
        ("2026-03-01T13:00:00.500001+01:00", False),
        (datetime(2026, 3, 1, 12, 0, 0, 499999, timezone.utc), True),
        (datetime(2026, 3, 1, 12, 0, 0, 500001, timezone.utc), False),
        (datetime(2026, 3, 1, 12, 0, 0, tzinfo=timezone.utc), False),
        (datetime(2026, 3, 1, 11, 59, 59, tzinfo=timezone.utc), True),
        (datetime(2026, 3, 1, 7, 0, 1), False),  # in which zone nobody knows
        (None, False),
    ],
)
@pytest.mark.parametrize("eta", [ETA, "2026-03-01T07:00:00.500000-05:00", "2026-03-01T12:00:00.500000"])
def test_result_that_is_older_than_the_eta_is_not_the_messages_own(eta: str, done: Any, before: bool) -> None:
    assert was_stored_before(Context(eta=eta), {"date_done": done}) is before


def test_message_that_may_have_begun_at_once_owns_what_is_stored() -> None:
    """Without an eta nothing tells it from the first."""
    assert not was_stored_before(Context(), {"date_done": "2026-03-01T11:00:00"})


def test_backend_without_times_is_believed() -> None:
    assert not was_stored_before(Context(eta=ETA), {})


def test_copy_of_a_second_delivery_has_an_eta_of_its_own() -> None:
    """It was put back while the first ran, which may have ended before the copy's time."""
    request = Context(eta=ETA, headers={HEADER: {"redelivered": True}})
    assert not was_stored_before(request, {"date_done": "2026-03-01T11:00:00"})
