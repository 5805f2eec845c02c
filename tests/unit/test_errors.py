"""Errors travel: Celery rebuilds them in other processes, and from a result backend's JSON."""

from __future__ import annotations

import copy
import pickle

import pytest
from celery import Celery

import celery_pglock
from celery_pglock import (
    LockDeadlock,
    LockError,
    LockKeyError,
    LockLost,
    LockNotAcquired,
    LockSetupError,
    LockUnavailable,
)

ERRORS = [
    LockKeyError("x: a Order has no stable text"),
    LockNotAcquired("celery:shop.train:42"),
    LockNotAcquired("celery:shop.train:42", 12.5, 3),
    LockLost("celery:shop.train:42"),
    LockLost("celery:shop.train:42", "the server ended its session"),
    LockUnavailable("connection refused"),
    LockDeadlock("deadlock detected"),
    LockSetupError("pglock_database_url leads to a standby"),
]

by_text = pytest.mark.parametrize("error", ERRORS, ids=str)


@by_text
def test_an_error_survives_pickle(error: LockError) -> None:
    """A prefork worker's child sends it to its parent by pickle."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(error, protocol))
        assert (type(twin), twin.args, str(twin)) == (type(error), error.args, str(error))
    assert copy.copy(error).args == error.args


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@by_text
def test_an_error_survives_the_result_backend(error: LockError, serializer: str) -> None:
    """Whoever waits for the result gets the same error, with the same words."""
    app = Celery("errors", backend="cache+memory://", set_as_current=False)
    app.conf.update(result_serializer=serializer, result_accept_content=[serializer])
    backend = app.backend
    stored = backend.decode(backend.encode(backend.prepare_exception(error)))
    twin = backend.exception_to_python(stored)
    assert (type(twin), str(twin)) == (type(error), str(error))
    assert tuple(twin.args) == error.args


@by_text
def test_an_error_is_a_sentence(error: LockError) -> None:
    """The text of an error can be read by people: no tuple, no repr of itself."""
    text = str(error)
    assert " " in text
    assert "\n" not in text
    assert not text.startswith(("(", type(error).__name__))


@by_text
def test_an_error_is_known_by_its_public_name(error: LockError) -> None:
    """Tracebacks and result backends name the module that users import it from."""
    assert isinstance(error, LockError)
    assert type(error).__module__ == "celery_pglock"
    assert getattr(celery_pglock, type(error).__name__) is type(error)


def test_every_error_is_tried_here() -> None:
    """A new error joins the list above."""
    public = {getattr(celery_pglock, name) for name in celery_pglock.__all__}
    errors = {each for each in public if isinstance(each, type) and issubclass(each, LockError)}
    assert {type(error) for error in ERRORS} == errors - {LockError}
