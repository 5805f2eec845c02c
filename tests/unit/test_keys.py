"""Names and ids: what old and new workers, and anybody with SQL, must agree on."""

from __future__ import annotations

import copy
import datetime as dt
import inspect
import pickle
from collections.abc import Callable
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from celery_pglock import LockId, LockKeyError
from celery_pglock.locks.keys import full_name, id_of, key_of


def train(tenant_id, full=False): ...


def pair(a, b): ...


def one(x): ...


def rest(*args, **kwargs): ...


def keyword_only(a, *, b=1): ...


def positional_only(a, /, b=1): ...


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Order:
    def __init__(self, id: int) -> None:
        self.id = id


def name_of(lock_key: Any, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The name of one call of a task `shop.train`, or the `LockId` that its key names."""
    key = key_of(lock_key, inspect.signature(body)).render(args, kwargs)
    return key if isinstance(key, LockId) else full_name("celery", "shop.train", key)


# Pinned: the ids were computed with coreutils' sha256sum. A change would let old and new workers overlap.


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("celery:shop.train", 1426616698566759029),
        ("celery:shop.train:", 3898785976954434345),
        ("celery:shop.train:5", 7970971555308499131),
        ("celery:shop.train:tenant:42", -2709006413674176643),
        ("celery:shop.train:tenant_id=42,full=False", -3500639887940936876),
        ("celery:shop.train:a=x%2Cy%3Dz,b=100%25", -3964140386387774328),
        ("celery:shop.train:tenant:é", 988786298847362305),
        ("prod:imports:42/x%2Fy", -110999192243236761),
    ],
)
def test_the_id_of_a_name_never_changes(name: str, id: int) -> None:
    """An id is the first eight bytes of the name's SHA-256, signed, in this release and all others."""
    assert id_of(name) == (id,)


@pytest.mark.parametrize(
    ("lock_key", "body", "args", "kwargs", "name"),
    [
        ("tenant:<tenant_id>", train, (42,), {}, "celery:shop.train:tenant:42"),
        ("all", train, (42,), {}, "celery:shop.train:all"),
        ("<x.id>/<x.id>", one, (Order(7),), {}, "celery:shop.train:7/7"),
        ("<x.id>", one, ({"id": 7},), {}, "celery:shop.train:7"),
        ("<x[0]>", one, ([7, 8],), {}, "celery:shop.train:7"),
        ("<x[-1]>", one, ([7, 8],), {}, "celery:shop.train:8"),
        ("<x[id]>", one, ({"id": 7},), {}, "celery:shop.train:7"),
        ("<x['id']>", one, ({"id": 7},), {}, "celery:shop.train:7"),
        ("<x[0].id>", one, ([{"id": 7}],), {}, "celery:shop.train:7"),
        ("<user>", rest, (), {"user": 3}, "celery:shop.train:3"),
        (None, train, (42,), {}, "celery:shop.train:tenant_id=42,full=False"),
        (None, keyword_only, (5,), {}, "celery:shop.train:a=5,b=1"),
        (None, positional_only, (5,), {}, "celery:shop.train:a=5,b=1"),
        (None, lambda: None, (), {}, "celery:shop.train"),
        (None, rest, (1, "x"), {"k": 2}, 'celery:shop.train:args=[1%2C"x"],kwargs={"k":2}'),
        (["full"], train, (42,), {}, "celery:shop.train:full=False"),
        (["full", "tenant_id"], train, (42,), {}, "celery:shop.train:tenant_id=42,full=False"),
        (["z", "b"], rest, (), {"z": 1, "b": 2}, "celery:shop.train:b=2,z=1"),
        ([], train, (42,), {}, "celery:shop.train"),
        (lambda tenant_id: f"t{tenant_id}", train, (42,), {}, "celery:shop.train:t42"),
        (lambda *_: 42, train, (42,), {}, "celery:shop.train:42"),
        (lambda *_: LockId(42), train, (42,), {}, LockId(42)),
        (lambda *_: LockId(1, 2), train, (42,), {}, LockId(1, 2)),
        # Inside a value the punctuation of the template is percent-encoded.
        ("<a>:<b>", pair, ("x:y", "z"), {}, "celery:shop.train:x%3Ay:z"),
        ("<a>:<b>", pair, ("x", "y:z"), {}, "celery:shop.train:x:y%3Az"),
        ("<a>/<b>", pair, ("x:y", "5%"), {}, "celery:shop.train:x:y/5%25"),
        ("<a>→<b>", pair, ("x→y", "z"), {}, "celery:shop.train:x%E2%86%92y→z"),
        (None, pair, ("x,y=z", "100%"), {}, "celery:shop.train:a=x%2Cy%3Dz,b=100%25"),
    ],
)
def test_names_of_calls(lock_key: Any, body: Any, args: Any, kwargs: Any, name: Any) -> None:
    """A name is ``<namespace>:<lock_name>:<rendered key>``, a callable's id is used as it is."""
    assert name_of(lock_key, body, *args, **kwargs) == name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (42, "42"),
        ("42", "42"),
        (4.5, "4.5"),
        (True, "True"),
        (None, "None"),
        (UUID("12345678-1234-5678-1234-567812345678"), "12345678-1234-5678-1234-567812345678"),
        (Decimal("1.10"), "1.10"),
        (dt.date(2024, 2, 29), "2024-02-29"),
        (dt.datetime(2024, 2, 29, 12, tzinfo=dt.timezone.utc), "2024-02-29T12:00:00+00:00"),
        (dt.time(12, 30), "12:30:00"),
        (Color.RED, "red"),
        (Level.HIGH, "3"),
        (b"\x00\xff", "00ff"),
        ([1, "a", None, True], '[1,"a",null,true]'),
        ((1, 2), "[1,2]"),
        ({"b": 1, "a": {"d": 2, "c": 3}}, '{"a":{"c":3,"d":2},"b":1}'),
        ({3, 1, 2}, "[1,2,3]"),
        ({"ids": [UUID(int=1), Decimal("1.0"), Color.RED]}, None),
    ],
)
def test_text_of_values(value: Any, text: str | None) -> None:
    """Each type that a message may hold has one text."""
    if text is None:
        text = '{"ids":["00000000-0000-0000-0000-000000000001","1.0","red"]}'
    assert name_of("<x>", one, value) == f"celery:shop.train:{text}"


# One call, one name.


def test_no_key_and_all_arguments_are_two_things() -> None:
    """`[]` locks the task, `None` each set of arguments."""
    assert name_of([], one, 1) == name_of([], one, 2)
    assert name_of(None, one, 1) != name_of(None, one, 2)


@given(a=st.integers(), b=st.text(), split=st.integers(0, 2), named=st.booleans())
def test_positional_and_keyword_calls_give_one_name(a: int, b: str, split: int, named: bool) -> None:
    """How an argument is passed makes no difference, whatever the form of the key."""
    lock_key = "<a>:<b>" if named else None
    arguments = {"a": a, "b": b}
    positional = list(arguments.values())[:split]
    keyword = dict(list(arguments.items())[split:])
    assert name_of(lock_key, pair, *positional, **keyword) == name_of(lock_key, pair, a, b)


@pytest.mark.parametrize("lock_key", [None, ["tenant_id", "full"], "<tenant_id>/<full>"])
def test_an_omitted_default_is_the_default(lock_key: Any) -> None:
    """Leaving an argument out names the same lock as passing its default."""
    names = {
        name_of(lock_key, train, 42),
        name_of(lock_key, train, 42, False),
        name_of(lock_key, train, tenant_id=42),
        name_of(lock_key, train, full=False, tenant_id=42),
    }
    assert len(names) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"tenant_id": 1}), ((1,), {"typo": 2})]
)
@pytest.mark.parametrize("lock_key", [None, "<tenant_id>"])
def test_a_call_that_does_not_fit_the_body_is_a_type_error(lock_key: Any, args: Any, kwargs: Any) -> None:
    """Arguments that the body would refuse raise what the body would raise."""
    with pytest.raises(TypeError):
        name_of(lock_key, train, *args, **kwargs)


# Different calls, different names.

texts = st.text(alphabet=st.sampled_from("ab5:%=,/-_ é→2A3") | st.characters(codec="utf-8"), max_size=6)
separators = st.text(alphabet="ab5:%=,/-_ é→2A3", min_size=1, max_size=3)


@given(first=st.tuples(texts, texts), second=st.tuples(texts, texts), separator=separators)
def test_two_calls_never_share_a_name_of_a_template(first: Any, second: Any, separator: str) -> None:
    """Whatever separates the placeholders, and whatever the arguments hold."""
    assume(first != second)
    try:
        key = f"p:<a>{separator}<b>.s"
        names = [name_of(key, pair, *values) for values in (first, second)]
    except LockKeyError:
        return  # a template that can't tell them apart is refused
    assert names[0] != names[1]


@pytest.mark.parametrize("separator", ["%", "%%", "5%", "%2", "%25", "25%25", ":", "_", "-a"])
def test_a_value_never_reads_as_a_separator(separator: str) -> None:
    """A percent sign separates no better than any other character; a template may be refused for it."""
    values = ["", "%", "25", "25%", "%25", "2", "5", "x", "x%", separator, f"x{separator}", f"{separator}25"]
    calls = [(a, b) for a in values for b in values]
    try:
        names = {name_of(f"<a>{separator}<b>", pair, *call) for call in calls}
    except LockKeyError:
        return
    assert len(names) == len(set(calls))


@given(first=st.tuples(texts, texts), second=st.tuples(texts, texts))
def test_two_calls_never_share_a_name_of_all_arguments(first: Any, second: Any) -> None:
    """The punctuation between arguments is never that of a value."""
    assume(first != second)
    assert name_of(None, pair, *first) != name_of(None, pair, *second)


def test_a_hundred_thousand_names_give_as_many_ids() -> None:
    """All 64 bits of the digest are used: 32 would collide here once or twice."""
    ids = [id_of(f"celery:shop.train:tenant:{n}")[0] for n in range(100_000)]
    assert len(set(ids)) == len(ids)
    for bit in range(64):
        ones = sum(id >> bit & 1 for id in ids)
        assert 49_000 < ones < 51_000, f"bit {bit} of an id is no coin's flip"


# What has no stable name is refused.


@pytest.mark.parametrize(
    ("lock_key", "body", "hint"),
    [
        ("tenant:{tenant_id}", train, "<tenant_id>"),
        ("tenant_id", train, "write <tenant_id>"),
        ("tenant:{}", train, "<argument>"),
        ("tenant:<tenant>", train, "it takes tenant_id, full"),
        ("<tenant_id.>", train, "<argument.name>"),
        ("<tenant_id", train, "stands alone"),
        ("a>b", train, "stands alone"),
        ("<>", train, "<argument>"),
        ("", train, r"write \[\]"),
        ("<a><b>", pair, "<a>:<b>"),
        ("<a>x<b>", pair, "<a>:<b>"),
        (["tenant"], train, "it takes tenant_id, full"),
        (["tenant_id", "ful"], train, "'ful' is no argument"),
        (["x"], lambda: None, "it takes none"),
    ],
)
def test_a_key_that_can_not_work_is_refused_with_a_hint(lock_key: Any, body: Any, hint: str) -> None:
    """The refusal comes when the key is compiled, and says what to write instead."""
    with pytest.raises(LockKeyError, match=hint):
        key_of(lock_key, inspect.signature(body))


@pytest.mark.parametrize("lock_key", [5, True, [1], b"x", b"", object()])
def test_what_is_no_key_is_a_type_error(lock_key: Any) -> None:
    """A key is a template, a list of names, a callable or None."""
    with pytest.raises(TypeError, match="a template, a list of argument names, a callable or None"):
        key_of(lock_key, inspect.signature(one))


@pytest.mark.parametrize(
    "value", [object(), Order(1), [Order(1)], {"a": {"b": Order(1)}}, {Order(1): 2}, 1j, iter([])]
)
@pytest.mark.parametrize("lock_key", [None, ["x"], "<x>"])
def test_a_value_without_stable_text_is_refused(lock_key: Any, value: Any) -> None:
    """A model object has no stable text, at any depth: the error names the argument and shows no value."""
    with pytest.raises(LockKeyError, match=r"^x: .* has no stable text"):
        name_of(lock_key, one, value)


@pytest.mark.parametrize(
    ("lock_key", "args"),
    [("<x.id>", ({},)), ("<x[3]>", ([1],)), ("<x.nope>", (Order(1),)), ("<x[0]>", (None,))],
)
def test_a_path_that_leads_nowhere_is_refused(lock_key: str, args: Any) -> None:
    """The error names the placeholder and the type that lacks the step."""
    with pytest.raises(LockKeyError, match=rf"<{lock_key[1:-1]}>".replace("[", r"\[") + ": there is no"):
        name_of(lock_key, one, *args)


@pytest.mark.parametrize("lock_key", ["<user>", ["user"]])
def test_a_body_with_kwargs_is_asked_at_each_call(lock_key: Any) -> None:
    """Only the call can tell which arguments a ``**kwargs`` body gets."""
    with pytest.raises(LockKeyError, match="no argument 'user'"):
        name_of(lock_key, rest, other=1)


@pytest.mark.parametrize("returned", [None, "", True, ["a"], b"x", Order(1)])
def test_a_callable_must_return_text_or_a_number(returned: Any) -> None:
    """None from a forgotten ``return`` would lock all calls alike."""
    with pytest.raises(LockKeyError, match="must return text, a number or a LockId"):
        name_of(lambda _: returned, one, 1)


def test_a_callable_that_raises_is_a_key_error() -> None:
    """What a key function raises says that no name can be made."""
    with pytest.raises(LockKeyError, match="lock_key raised ZeroDivisionError"):
        name_of(lambda x: 1 / x, one, 0)


def test_a_lone_surrogate_is_refused() -> None:
    """What can't be encoded can't be hashed."""
    with pytest.raises(LockKeyError, match="Unicode"):
        id_of(name_of("<x>", one, "\ud800"))


def test_a_name_does_not_follow_an_argument_that_is_changed_later() -> None:
    """A name is text: what the body does with its arguments changes nothing."""
    argument = {"a": [1]}
    name = name_of(None, one, argument)
    argument["a"].append(2)
    assert name == 'celery:shop.train:x={"a":[1]}'


# Ids that are used as they are.


@pytest.mark.parametrize("key", [-(2**63), -1, 0, 2**63 - 1])
def test_one_key_may_have_64_bits(key: int) -> None:
    """``LockId(n)`` is a bigint."""
    assert tuple(LockId(key)) == (key,)


@pytest.mark.parametrize("keys", [(-(2**31), 0), (0, 2**31 - 1), (-1, -1)])
def test_two_keys_have_32_bits_each(keys: tuple[int, int]) -> None:
    """``LockId(subsystem, entity)`` is a pair of integers."""
    assert tuple(LockId(*keys)) == keys


@pytest.mark.parametrize("keys", [(2**63,), (-(2**63) - 1,), (2**31, 0), (0, -(2**31) - 1)])
def test_a_number_that_postgresql_can_not_hold_is_refused(keys: tuple[int, ...]) -> None:
    """Out of range here, and not in the middle of a task."""
    with pytest.raises(ValueError, match="outside"):
        LockId(*keys)


@pytest.mark.parametrize("keys", [("1",), (1.0,), (True,), (1, "2"), (1, False)])
def test_an_id_takes_whole_numbers_only(keys: tuple[Any, ...]) -> None:
    """Text belongs into a name."""
    with pytest.raises(TypeError, match="whole numbers"):
        LockId(*keys)


@pytest.mark.parametrize("id", [LockId(5), LockId(-5, 6)])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_id_can_be_pickled_and_copied(id: LockId, protocol: int) -> None:
    """An id travels, and stays a `LockId` of the same space."""
    for twin in (pickle.loads(pickle.dumps(id, protocol)), copy.copy(id), copy.deepcopy(id)):
        assert twin == id
        assert type(twin) is LockId
        assert repr(twin) == repr(id)


def test_the_two_spaces_never_meet() -> None:
    """One 64-bit key is no pair, even where the bits are the same."""
    assert LockId(5) != LockId(0, 5)
    assert len({LockId(5), LockId(0, 5), LockId(5)}) == 2
