"""One value against what a schema says of it: the value as its type, or an error that helps."""

from __future__ import annotations

import math
import re
from typing import Any

from common.errors import SlackwaterError

MAX_INT = 2**63 - 1  # what msgpack and Redis carry
FIELD_CHARS = 100
NUMBER_CHARS = 40

Schema = dict[str, Any]


class InvalidRequest(SlackwaterError, ValueError):
    """A push that cannot become a job: names the field, what is wrong, what would be right."""

    def __init__(self, field: str, message: str) -> None:
        # A field's name came over the wire too: long, or not even text that can be encoded.
        field = field.encode("utf-8", "replace").decode()
        self.field = field if len(field) <= FIELD_CHARS else field[:FIELD_CHARS] + "…"
        super().__init__(f"{self.field}: {message}")


class Text(str):
    """A value that came as text (redis-cli): '20' may become an int, unlike a payload's '20'."""


def check(name: str, value: Any, rule: Schema) -> Any:
    """`value` as the type `rule` asks for; raises InvalidRequest that names the remedy."""
    if value is None:
        if rule.get("nullable") or ("default" in rule and rule["default"] is None):
            return None
        raise InvalidRequest(name, "must not be null")
    kind = rule.get("type", "str")
    if kind == "str":
        return _check_str(name, value, rule)
    if kind == "bool":
        return _check_bool(name, value)
    if kind == "int":
        return _check_int(name, value, rule)
    if kind == "float":
        return _check_float(name, value, rule)
    if kind == "list[float]":
        if isinstance(value, Text):
            value = [Text(part) for part in value.replace(",", " ").split()]
        if not isinstance(value, list) or len(value) > rule.get("max_length", 1000):
            raise InvalidRequest(
                name, f"must be a list of up to {rule.get('max_length', 1000)} numbers"
            )
        return [_check_float(name, item, rule) for item in value]
    raise InvalidRequest(name, f"has a type this version does not know: {kind}")


def _check_str(name: str, value: Any, rule: Schema) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(name, f"must be text, not {type(value).__name__}")
    if "\x00" in value:
        raise InvalidRequest(name, f"contains a NUL character at {value.index(chr(0))}; remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            name, "contains half a surrogate pair; send whole characters"
        ) from error
    if "choices" in rule and value not in rule["choices"]:
        raise InvalidRequest(name, f"{value[:64]!r} is not one of {', '.join(rule['choices'])}")
    if len(value) > rule.get("max_length", 10_000):
        raise InvalidRequest(
            name, f"has {len(value)} characters; up to {rule.get('max_length', 10_000)} are allowed"
        )
    if rule.get("required") and not value.strip():
        raise InvalidRequest(name, "must not be empty")
    return str(value)


def _check_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Text) and value.lower() in ("true", "1", "yes", "on"):
        return True
    if isinstance(value, Text) and value.lower() in ("false", "0", "no", "off"):
        return False
    raise InvalidRequest(name, "must be true or false")


def _check_int(name: str, value: Any, rule: Schema) -> int:
    if isinstance(value, Text) and re.fullmatch(r"[+-]?\d{1,20}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"must be a whole number, not {_shown(value)}")
    _check_range(name, value, rule)
    if abs(value) > MAX_INT:
        raise InvalidRequest(name, f"{value!r:.40} is too large; the most is {MAX_INT}")
    each, first = rule.get("multiple_of"), 0
    if not each:
        each, first = rule.get("step", 1), rule.get("min", 0)
    if (value - first) % each:
        low = value - (value - first) % each
        bounds = rule.get("min", 1), rule.get("max", math.inf)
        near = [v for v in (low, low + each) if bounds[0] <= v <= bounds[1]]
        right = (
            f"; {' and '.join(map(str, near))} {'are' if len(near) > 1 else 'is'}" if near else ""
        )
        what = f"{first} and a multiple of {each}" if first else f"a multiple of {each}"
        raise InvalidRequest(name, f"{value} is not {what}{right}")
    return value


def _check_float(name: str, value: Any, rule: Schema) -> float:
    if isinstance(value, Text):
        try:
            value = float(value)
        except ValueError:
            raise InvalidRequest(name, f"must be a number, not {value[:64]!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, f"must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(name, f"must be a finite number, not {number}")
    _check_range(name, number, rule)
    return number


def _shown(value: Any) -> str:
    """A refused value in an error message, whatever it is."""
    if isinstance(value, str | bytes | int | float | bool | None):
        return f"{value!r:.64}"
    return type(value).__name__


def _check_range(name: str, value: float, rule: Schema) -> None:
    low, high, above = rule.get("min"), rule.get("max"), rule.get("above")
    said = str(value)  # JSON has numbers of any length
    said = said if len(said) <= NUMBER_CHARS else f"{said[:NUMBER_CHARS]}…"
    if above is not None and value <= above:
        raise InvalidRequest(name, f"{said} is too small; it must be above {above}")
    if low is not None and value < low:
        raise InvalidRequest(name, f"{said} is too small; {_span(low, high)}")
    if high is not None and value > high:
        raise InvalidRequest(name, f"{said} is too large; {_span(low, high)}")


def _span(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"it must be from {low} to {high}"
    return f"the least is {low}" if low is not None else f"the most is {high}"
