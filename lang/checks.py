"""What value an option may have.

A check gets a value as the user wrote it and the place it was written (`gen("age"): max_tokens`). It
gives back the value to keep, or raises `OptionError` with that place in front.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, SupportsIndex

from .errors import ConstraintError, OptionError
from .regex import normalize


def whole_number(value: object, where: str, *, least: int, hint: str = "") -> int:
    """A whole number of at least `least`; anything that Python accepts as an index, but no bool."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise OptionError(f"{where} must be a whole number, got {shown(value)}.")
    number = operator.index(value)
    if number < least:
        raise OptionError(f"{where} must be at least {least}, got {number}.{hint}")
    return number


def real_number(value: object, where: str) -> float:
    """A finite number that is not a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OptionError(f"{where} must be a number, got {shown(value)}.")
    number = float(value)
    if not math.isfinite(number):
        raise OptionError(f"{where} must be finite, got {number}.")
    return number


def max_tokens(value: object, where: str) -> int:
    return whole_number(value, where, least=1, hint=" To score given text, use select().")


def sample_count(value: object, where: str) -> int:
    return whole_number(value, where, least=1)


def seed(value: object, where: str) -> int:
    """A whole number that fits 63 bits, so that every backend can pass it on."""
    number = whole_number(value, where, least=0)
    if number >= 2**63:
        raise OptionError(f"{where} must be below 2**63, got {number}.")
    return number


def temperature(value: object, where: str) -> float:
    number = real_number(value, where)
    if number < 0:
        raise OptionError(f"{where} must be at least 0, got {number}. 0 takes the likeliest token each time.")
    return number


def top_p(value: object, where: str) -> float:
    number = real_number(value, where)
    if not 0 < number <= 1:
        raise OptionError(f"{where} must be above 0 and at most 1, got {number}. 1 turns it off.")
    return number


def top_k(value: object, where: str) -> int:
    """At least 1, or -1 for off."""
    number = whole_number(value, where, least=-1)
    if number == 0 or number < -1:
        raise OptionError(f"{where} must be at least 1, or -1 for off, got {number}.")
    return number


def count(value: object, where: str) -> int:
    return whole_number(value, where, least=0)


def probability(value: object, where: str) -> float:
    number = real_number(value, where)
    if not 0 <= number <= 1:
        raise OptionError(f"{where} must be at least 0 and at most 1, got {number}. 0 turns it off.")
    return number


def factor(value: object, where: str) -> float:
    number = real_number(value, where)
    if number <= 0:
        raise OptionError(f"{where} must be above 0, got {number}. 1 turns it off.")
    return number


def token_ids(value: object, where: str) -> tuple[int, ...]:
    """One id of a token or several."""
    if isinstance(value, SupportsIndex):
        return (whole_number(value, where, least=0),)
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise OptionError(f"{where} must be a list of token ids, got {shown(value)}.")
    return tuple(whole_number(item, f"{where}[{index}]", least=0) for index, item in enumerate(value))


def logit_bias(value: object, where: str) -> tuple[tuple[int, float], ...]:
    """A number for each id of a token; ids may be strings, as JSON has no others."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{where} must be a dict of token ids and numbers, got {shown(value)}.")
    found: list[tuple[int, float]] = []
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        found.append((whole_number(token, f"{where}: a key", least=0), real_number(number, f"{where}[{key!r}]")))
    return tuple(found)


def flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{where} must be True or False, got {shown(value)}.")
    return value


OnTruncate = Literal["keep", "close"]


def on_truncate(value: object, where: str) -> OnTruncate:
    if value == "keep" or value == "close":
        return value
    raise OptionError(f'{where} must be "keep" or "close", got {shown(value)}.')


def string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{where} must be a string, got {shown(value)}.")
    return characters(value, where)


def characters(value: str, where: str) -> str:
    """A text of characters: a lone surrogate, half of one, has no bytes and so no tokens."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise OptionError(
            f"{where} has half a character, {value[at]!r}, at position {at}: {shown(value[max(0, at - 20) :])}. "
            'It was read with errors="surrogateescape" or cut out of UTF-16.'
        ) from None
    return value


def stop(value: object, where: str) -> tuple[str, ...]:
    """One string or several; none is none, and the empty string, which is found in every text, is refused."""
    texts = (characters(value, where),) if isinstance(value, str) else strings(value, where)
    if "" in texts:
        raise OptionError(f"{where} holds an empty string, which every text contains. Write None or [] for no stop.")
    return texts


def patterns(value: object, where: str) -> tuple[str, ...]:
    """One pattern or several, in the spelling of `regex.normalize`."""
    given = (characters(value, where),) if isinstance(value, str) else strings(value, where)
    try:
        return tuple(map(normalize, given))
    except ConstraintError as error:
        raise ConstraintError(f"{where}: {error}") from error


def choices(value: object, where: str) -> tuple[str, ...]:
    """At least one string, none empty; of equal ones the first is kept."""
    if isinstance(value, str):
        raise OptionError(f"{where} must be a list of strings, got the string {value!r}. Write [{value!r}].")
    texts = tuple(dict.fromkeys(strings(value, where)))
    if not texts:
        raise OptionError(f"{where} must hold at least one string, got none.")
    if "" in texts:
        raise OptionError(f"{where} holds an empty string, which has no token to compare. Leave it out.")
    return texts


def strings(value: object, where: str) -> tuple[str, ...]:
    """Any iterable of strings, in its order."""
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise OptionError(f"{where} must be a list of strings, got {shown(value)}.")
    items = tuple(value)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise OptionError(f"{where}[{index}] must be a string, got {shown(item)}. Write str(...) around it.")
        characters(item, f"{where}[{index}]")
    return items


def json_text(value: object, where: str) -> str:
    """`value` as JSON: what is kept is a copy, and the same everywhere."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{where} must be what JSON can say, got {shown(value)}: {error}.") from error
    return characters(text, where)


def functions(value: object, where: str) -> list[object]:
    """Schemas or calls of tools, in OpenAI's form or only its inner part: dicts that name a function."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise OptionError(f"{where} must be a list of dicts, got {shown(value)}.")
    items = list(value)
    for index, item in enumerate(items):
        inner = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise OptionError(
                f'{where}[{index}] must be a dict like {{"type": "function", "function": {{"name": ...}}}}, '
                f"got {shown(item)}."
            )
    return items


def shown(value: object) -> str:
    """`value` as an error shows it: with its type, and short."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the one of `known` most like `name`, or lists them all."""
    names = sorted(known)
    return did_you_mean(name, names) or f"Known: {', '.join(names)}."


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A sentence that names the one of `known` most like `name`; "" if none is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}?" if close else ""
