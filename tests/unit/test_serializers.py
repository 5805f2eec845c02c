"""The producer's arguments and the worker's give one name, whatever serializer lies between them."""

from __future__ import annotations

import datetime as dt
import enum
import inspect
import math
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import serialization

from celery_pglock.locks.keys import id_of, key_of

BERLIN = dt.timezone(dt.timedelta(hours=2))


class Color(enum.Enum):
    RED = "red"


class Fruit(str, enum.Enum):
    APPLE = "apple"


class Level(enum.IntEnum):
    HIGH = 3


def body(x, y=None): ...


def through(serializer: str, value: Any) -> Any:
    """What a worker gets of a value that a producer passed."""
    content_type, encoding, data = serialization.dumps(value, serializer=serializer)
    return serialization.loads(data, content_type, encoding, accept=[content_type])


def id_for(value: Any) -> Any:
    return [id_of(key_of(key, inspect.signature(body)).render((value,), {})) for key in (None, "t:<x>")]


PLAIN = [
    "text",
    "42",
    "é→%,=",
    42,
    -(2**70),
    4.5,
    1e300,
    -0.0,
    math.inf,
    True,
    None,
    [1, [2, "x"]],
    (1, 2),
    [(1, 2), (3, [4])],
    {"b": 1, "a": {"d": [1, {"f": 2}], "c": None}},
    {3: "a", 2.5: "b", None: "c", True: "d"},
    [],
    {},
]
RICH = [
    UUID(int=7),
    Decimal("1.10"),
    dt.time(12, 30, 1, 5),
    dt.time(12, 30, tzinfo=BERLIN),
    {"ids": [UUID(int=7), Decimal("1.0")], "at": (dt.time(1),)},
    Fruit.APPLE,
    Level.HIGH,
]
DATED = [
    dt.date(2024, 2, 29),
    dt.datetime(2024, 2, 29, 12),
    dt.datetime(2024, 2, 29, 12, 0, 0, 1, tzinfo=dt.timezone.utc),
    dt.datetime(2024, 2, 29, 12, tzinfo=BERLIN),
    {"at": [dt.date(2024, 2, 29), dt.datetime(2024, 2, 29, 12, tzinfo=BERLIN)]},
    b"bytes",
    b"\x00\xff",
]
PYTHON_ONLY = [Color.RED, frozenset({1, 2}), bytearray(b"x"), {"s": {(1, 2), (0,)}}]
SETS = [{3, 1, 2}, {"c", "a", "b"}]


def name_of(value: object) -> str:
    """The same in each run: a set has no order."""
    return repr(sorted(value)) if isinstance(value, (set, frozenset)) else repr(value)


@pytest.mark.parametrize("value", PLAIN + RICH + DATED, ids=name_of)
def test_json_does_not_change_the_name(value: Any) -> None:
    """Whatever kombu's JSON can carry has the same name on both sides."""
    assert id_for(through("json", value)) == id_for(value)


@pytest.mark.parametrize("value", PLAIN + RICH + DATED + PYTHON_ONLY + SETS, ids=name_of)
def test_pickle_does_not_change_the_name(value: Any) -> None:
    """Whatever pickle can carry and has a stable text has the same name on both sides."""
    assert id_for(through("pickle", value)) == id_for(value)


@pytest.mark.parametrize("value", PLAIN + DATED + SETS, ids=name_of)
def test_yaml_does_not_change_the_name(value: Any) -> None:
    """Whatever YAML can carry has the same name on both sides."""
    pytest.importorskip("yaml")
    assert id_for(through("yaml", value)) == id_for(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_no_value_that_json_can_carry_changes_its_name(value: Any) -> None:
    """The same for any nesting of what JSON knows."""
    if value == {"__type__": "", "__value__": ""}:
        return
    assert id_for(through("json", value)) == id_for(value)


@given(st.dictionaries(st.text(), st.integers(), min_size=2), st.randoms())
def test_the_order_of_a_dict_does_not_change_the_name(value: dict[str, int], random: Any) -> None:
    """Dicts are sets of pairs, at every level."""
    items = list(value.items())
    random.shuffle(items)
    assert id_for([{"in": value}]) == id_for([{"in": dict(items)}])


def test_lists_and_tuples_give_one_name() -> None:
    """JSON makes lists of tuples."""
    assert id_for((1, (2, 3))) == id_for([1, [2, 3]])


def test_an_object_before_json_and_its_mapping_behind_it_give_one_name() -> None:
    """A template that reaches inside finds an item where the producer had an attribute."""

    class Order:
        id = 7

        def __json__(self) -> dict[str, int]:
            return {"id": self.id}

    key = key_of("<x.id>", inspect.signature(body))
    assert key.render((Order(),), {}) == key.render((through("json", Order()),), {}) == "7"
