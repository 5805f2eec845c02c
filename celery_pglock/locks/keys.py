"""Arguments -> name -> id. Pure functions: no I/O, no Celery, no PostgreSQL.

A *name* is text, ``<namespace>:<lock_name>:<rendered key>``. An *id* is what PostgreSQL sees: the first
eight bytes of the name's SHA-256, big-endian, signed. The id of a given name never changes between
releases, since old and new workers must exclude each other during a deploy.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

from .errors import LockKeyError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Key", "LockId", "full_name", "id_of", "key_of"]

BIGINT = range(-(2**63), 2**63)
INTEGER = range(-(2**31), 2**31)


class LockId(tuple[int, ...]):
    """An id that is used as it is, for locks shared with other programs.

    ``LockId(n)`` is one 64-bit key, ``LockId(subsystem, entity)`` a pair of 32-bit keys; the two spaces
    never meet (https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS).
    Raises `ValueError` for a number that PostgreSQL can't hold, `TypeError` for what is no whole number.
    """

    __slots__ = ()

    def __new__(cls, key: int, entity: int | None = None) -> Self:
        keys, valid = ((key,), BIGINT) if entity is None else ((key, entity), INTEGER)
        for number in keys:
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"LockId takes whole numbers, not {number!r}")
            if number not in valid:
                raise ValueError(f"LockId: {number} is outside {valid.start} .. {valid.stop - 1}")
        return super().__new__(cls, keys)

    def beside(self, slot: int) -> LockId:
        """The id of a slot of this one, away from the edge of the numbers. Slot 0 is the id itself."""
        last = self[-1] - slot if self[-1] > 0 else self[-1] + slot
        return LockId(last) if len(self) == 1 else LockId(self[0], last)

    def slot_of(self, other: LockId) -> int:
        """The slot of this id that another one is, a number below 0 for an id elsewhere."""
        if len(self) != len(other) or self[:-1] != other[:-1]:
            return -1
        return self[-1] - other[-1] if self[-1] > 0 else other[-1] - self[-1]

    def __getnewargs__(self) -> tuple[int, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"LockId({', '.join(map(str, self))})"


def id_of(name: str) -> LockId:
    """Return the id of a name.

    The same in SQL::

        ('x' || encode(substring(sha256(convert_to(NAME, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
    """
    try:
        digest = hashlib.sha256(name.encode()).digest()
    except UnicodeEncodeError as exc:
        raise LockKeyError(f"the lock's name is no valid Unicode text: {exc.reason}") from None
    # Eight signed bytes need no look at their range.
    return tuple.__new__(LockId, (int.from_bytes(digest[:8], "big", signed=True),))


def full_name(namespace: str, lock_name: str, rendered: str | None) -> str:
    """Put a name together. No key (`None`) leaves the lock's name alone; an empty one is a key."""
    return f"{namespace}:{lock_name}" if rendered is None else f"{namespace}:{lock_name}:{rendered}"


class Key:
    """What is locked: from the arguments of one call to text, or to a `LockId`.

    Arguments are bound through the body's signature with its defaults, so that positional, keyword and
    omitted-default calls give one key.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        self._parameters = dict(signature.parameters)
        self._names = self._parameters.keys()
        parameters = self._parameters.values()
        self._plain = all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
        self._defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Bind a call's arguments. Raises `TypeError`, as the body itself would."""
        if self._plain and len(args) <= len(self._parameters):
            # Most bodies and most calls: ten times as fast as what follows, on the way of every task.
            given = dict(zip(self._parameters, args, strict=False), **kwargs)
            complete = self._defaults | given
            if len(given) == len(args) + len(kwargs) and complete.keys() == self._names:
                return complete
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def render(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | LockId | None:
        """Return the key of one call, `None` for the lock's name alone. Raises `LockKeyError`."""
        raise NotImplementedError


def key_of(
    lock_key: str | Collection[str] | Callable[..., object] | None, signature: inspect.Signature
) -> Key:
    """Compile a ``lock_key`` against the signature of the body.

    Raises `LockKeyError` for what can't become a key of this body, `TypeError` for what is no key at all.
    """
    if lock_key is None:
        return ArgumentsKey(signature, signature.parameters)
    if isinstance(lock_key, str):
        return TemplateKey(signature, lock_key)
    if callable(lock_key):
        return CallableKey(signature, lock_key)
    is_list = isinstance(lock_key, Collection) and not isinstance(lock_key, (bytes, bytearray, Mapping))
    if is_list and all(isinstance(name, str) for name in lock_key):
        return ArgumentsKey(signature, lock_key)
    raise TypeError(f"a template, a list of argument names, a callable or None, not {lock_key!r}")


class ArgumentsKey(Key):
    """``a=1,b=x`` for some arguments, or for all, in the signature's order."""

    def __init__(self, signature: inspect.Signature, names: Collection[str]) -> None:
        super().__init__(signature)
        for name in names:
            check_argument(name, signature)
        self.names = [name for name in signature.parameters if name in names]
        # What only a **kwargs body knows comes behind, in the order of the alphabet.
        self.names += sorted(set(names) - set(signature.parameters))

    def render(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        if not self.names:
            return None
        arguments = self.arguments(args, kwargs)
        pairs = ((name, argument(arguments, name, self.signature)) for name in self.names)
        return ",".join(f"{name}={quote(text_of(value, name), '=,')}" for name, value in pairs)


class TemplateKey(Key):
    """``tenant:<tenant_id>``; ``<order.id>`` and ``<rows[0]>`` reach inside."""

    placeholder = re.compile(r"<([^<>]*)>")
    path = re.compile(r"(?P<root>[^\W\d]\w*)(?P<steps>(?:\.[^\W\d]\w*|\[[^\[\]]+\])*)")
    step = re.compile(r"\.(?P<name>\w+)|\[(?P<index>[^\[\]]+)\]")

    def __init__(self, signature: inspect.Signature, template: str) -> None:
        super().__init__(signature)
        if not template:
            raise LockKeyError("the template is empty: write [] for the lock's name alone")
        if template in signature.parameters:
            raise LockKeyError(f"{template!r} is a text with no placeholder: write <{template}>")
        self.check_braces(template)
        # re.split with one group: literal, placeholder, literal, placeholder, ..., literal
        self.literals = self.placeholder.split(template)[::2]
        paths = [self.parse(inner) for inner in self.placeholder.findall(template)]
        #: Each placeholder, and the literal behind it.
        self.parts = list(zip(paths, self.literals[1:], strict=True))
        self.punctuation = "".join(c for c in set("".join(self.literals)) if not c.isalnum())
        self.check_separators(template)

    def render(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        arguments = self.arguments(args, kwargs)
        rendered = [self.literals[0]]
        for (root, steps, label), literal in self.parts:
            value = argument(arguments, root, self.signature)
            for step in steps:
                value = reach(value, step, label)
            rendered += quote(text_of(value, label), self.punctuation), literal
        return "".join(rendered)

    def check_braces(self, template: str) -> None:
        if braces := re.search(r"\{([^{}]*)\}", template):
            raise LockKeyError(f"{braces[0]!r} is no placeholder: write <{braces[1] or 'argument'}>")
        if stray := re.search(r"[<>{}]", self.placeholder.sub("", template)):
            raise LockKeyError(f"{stray[0]!r} stands alone in {template!r}: a placeholder is <argument>")

    def check_separators(self, template: str) -> None:
        for literal in self.literals[1:-1]:
            if not set(literal) & set(self.punctuation.replace("%", "")):
                raise LockKeyError(
                    f"two placeholders of {template!r} have no punctuation (but %) between them, so that"
                    " different arguments could give one name: write <a>:<b>"
                )

    def parse(self, inner: str) -> tuple[str, list[str | int], str]:
        match = self.path.fullmatch(inner)
        if match is None:
            raise LockKeyError(
                f"<{inner}> is no placeholder: write <argument>, <argument.name> or <argument[0]>"
            )
        check_argument(match["root"], self.signature)
        steps: list[str | int] = []
        for step in self.step.finditer(match["steps"]):
            index = step["index"]
            is_number = index is not None and re.fullmatch(r"-?\d+", index)
            steps.append(int(index) if is_number else step["name"] or index.strip("'\""))
        return match["root"], steps, inner


class CallableKey(Key):
    """What a function of the task's own arguments returns."""

    def __init__(self, signature: inspect.Signature, function: Callable[..., object]) -> None:
        super().__init__(signature)
        self.function = function

    def render(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | LockId:
        try:
            key = self.function(*args, **kwargs)
        except Exception as exc:
            raise LockKeyError(f"lock_key raised {type(exc).__name__}: {exc}") from exc
        if isinstance(key, LockId):
            return key
        if isinstance(key, bool) or not isinstance(key, (str, int, float, Decimal)) or key == "":
            raise LockKeyError(f"lock_key returned {key!r}: it must return text, a number or a LockId")
        return text_of(key, "lock_key")


def check_argument(name: str, signature: inspect.Signature) -> None:
    """Refuse a name that the body does not take. A ``**kwargs`` body is asked at each call."""
    parameters = signature.parameters
    if name not in parameters and var_keyword(signature) is None:
        known = ", ".join(parameters) or "none"
        raise LockKeyError(f"{name!r} is no argument of the body: it takes {known}")


def argument(arguments: Mapping[str, Any], name: str, signature: inspect.Signature) -> Any:
    if name in arguments:
        return arguments[name]
    extra = arguments[var_keyword(signature) or ""]
    if name not in extra:
        raise LockKeyError(f"the call has no argument {name!r}")
    return extra[name]


def var_keyword(signature: inspect.Signature) -> str | None:
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return name
    return None


def reach(value: Any, step: str | int, label: str) -> Any:
    """One step into a value: a mapping's item, a sequence's, or an attribute.

    Mappings come first: what is an object for the caller is a mapping behind the JSON serializer.
    """
    try:
        if isinstance(value, Mapping):
            return value[step] if step in value else value[str(step)]
        return value[step] if isinstance(step, int) else getattr(value, step)
    except (LookupError, TypeError, AttributeError):
        raise LockKeyError(f"<{label}>: there is no {step!r} in a {type(value).__name__}") from None


def quote(text: str, punctuation: str) -> str:
    """Percent-encode what would read as part of the template."""
    if text.isalnum():
        return text
    for character in "%" + punctuation.replace("%", ""):
        if character in text:
            encoded = "".join(f"%{byte:02X}" for byte in character.encode())
            text = text.replace(character, encoded)
    return text


def text_of(value: Any, label: str) -> str:
    """Render one value: the same text before and after a trip through the message serializer."""
    if type(value) is str or type(value) is int:
        return str(value)
    plain = plain_of(value, label)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, (list, dict)):
        return json.dumps(plain, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return str(plain)


def plain_of(value: Any, label: str) -> Any:
    """Reduce a value to what JSON knows. Raises `LockKeyError` for what has no stable text."""
    if isinstance(value, Enum):
        return plain_of(value.value, label)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (UUID, Decimal)):
        return str(value)
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {key_text(key, label): plain_of(item, label) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(
            (plain_of(item, label) for item in value), key=lambda item: json.dumps(item, sort_keys=True)
        )
    if isinstance(value, Sequence):
        return [plain_of(item, label) for item in value]
    raise LockKeyError(f"{label}: a {type(value).__name__} has no stable text: lock by one of its fields")


def key_text(key: Any, label: str) -> str:
    """A mapping's key as JSON writes it: the serializer turns True into "true" and 1 into "1"."""
    plain = plain_of(key, label)
    return plain if isinstance(plain, str) else json.dumps(plain)
