"""JSON Schema for the library that compiles it, and an honest word about what of it cannot be held.

Most schemas are held exactly. For one with keywords that no grammar is made of here (`uniqueItems`, `not`, `if`), what
remains is held, the rest is looked at when the text is finished, and both are said. Members stand in the order of
the schema, with `", "` and `": "` between them, as most models write JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer

from ..errors import ConstraintError
from ..messages import shortened, shown

MAX_CHARACTERS = 4_000_000
"""A larger schema is refused unread."""

_REFUSED = ("Unimplemented keys", "oneOf constraints are not supported")
_CIRCULAR = "circular references with sibling keys"
_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"})
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")
_UNIMPLEMENTED = re.compile(r'Unimplemented keys: (?P<keys>\[.*\])(?P<times>.*)')
_DATA = frozenset({"const", "enum", "default", "examples"})
_DEFINING = frozenset({"$schema", "$id", "id", "$defs", "definitions"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


@dataclass(frozen=True, slots=True)
class Checked:
    """What a compiled schema leaves to be said.

    exact: every text that is let through fulfils the schema; `warnings` then tell of formats that are only notes.
    """

    schema: Any
    exact: bool
    warnings: tuple[str, ...]

    def violation(self, text: str) -> str:
        """Why `text` does not fulfil the schema; "" if it does."""
        try:
            validator = validator_for(self.schema, default=jsonschema.Draft202012Validator)(self.schema)
            error = best_match(validator.iter_errors(json.loads(text)))
        except Exception as problem:  # a schema may be wrong in a way that shows only here
            return f"it cannot be checked: {shortened(str(problem), 200)}"
        if error is None:
            return ""
        return f"{shortened(error.message, 200)} (at {error.json_path}, by {error.validator})"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A schema as the library follows it."""

    matcher: LLMatcher
    checked: Checked


def prepare(text: str, tokenizer: LLTokenizer) -> Prepared:
    """Compile the schema `text`, exactly if that can be done.

    Raises:
        ConstraintError: it is no JSON Schema, too large, or nothing can fulfil it.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConstraintError(f"the schema is too large: {len(text)} characters, at most {MAX_CHARACTERS} are read.")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema {shown(text)} is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"a schema must be a JSON object, true or false, got {shown(text)}.")
    if schema is False:
        raise ConstraintError("the schema is false, which nothing fulfils.")
    try:
        return _prepare({} if schema is True else schema, tokenizer)
    except RecursionError:
        raise ConstraintError("the schema is nested too deep.") from None


def _prepare(schema: Any, tokenizer: LLTokenizer) -> Prepared:
    warnings: list[str] = []
    wanted = without_patterns(schema, warnings)
    exact = not warnings
    matcher, error = _compiled(wanted, tokenizer, lenient=False)
    if error.startswith("Unknown format"):
        wanted = without_formats(wanted, tokenizer, warnings)
        matcher, error = _compiled(wanted, tokenizer, lenient=False)
    if _CIRCULAR in error:
        told = len(warnings)
        is_old = any(draft in str(schema.get("$schema")) for draft in _OLD_DRAFTS)
        wanted = without_siblings(wanted, warnings, ignored=is_old)
        exact &= len(warnings) == told
        matcher, error = _compiled(wanted, tokenizer, lenient=False)
    if error.startswith(_REFUSED):
        exact = False
        matcher, error = _compiled(wanted, tokenizer, lenient=True)
        warnings += [f"not held while it is written: {_keywords(said)}" for said in matcher.get_grammar_warnings()]
    if error:
        raise ConstraintError(f"the schema cannot be compiled: {shortened(' '.join(error.split()), 300)}")
    return Prepared(matcher, Checked(schema, exact, tuple(dict.fromkeys(warnings))))


def _compiled(schema: Any, tokenizer: LLTokenizer, *, lenient: bool) -> tuple[LLMatcher, str]:
    """A matcher, and what is wrong with it; "" if nothing is."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema),
            overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": lenient},
        )
    except ValueError as error:
        raise ConstraintError(f"the schema cannot be compiled: {error}") from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    return matcher, matcher.get_error().split("<backtrace>")[0]


def without_formats(schema: Any, tokenizer: LLTokenizer, warnings: list[str]) -> Any:
    """`schema` without the formats that are unknown here: by the specification a format is a note, not a rule."""
    known: dict[str, bool] = {}

    def is_known(name: object) -> bool:
        if not isinstance(name, str):
            return True  # wrong in another way
        if name not in known:
            known[name] = not _compiled({"type": "string", "format": name}, tokenizer, lenient=False)[1]
            if not known[name]:
                warnings.append(f'the format "{name}" is unknown and not held')
        return known[name]

    return _without(schema, "format", is_known)


def without_patterns(schema: Any, warnings: list[str]) -> Any:
    """`schema` without patterns that look around or back, which no grammar can."""

    def is_held(pattern: object) -> bool:
        if not isinstance(pattern, str) or not any(mark in pattern for mark in ("(?=", "(?!", "(?<=", "(?<!")):
            return True
        warnings.append(f"not held while it is written: the look-around of the pattern {shown(pattern)}")
        return False

    return _without(schema, "pattern", is_held)


def without_siblings(node: Any, warnings: list[str], *, ignored: bool) -> Any:
    """A schema whose references stand alone.

    ignored: by its draft what stands beside a reference means nothing; otherwise a warning says what is lost.
    """
    if isinstance(node, list):
        return [without_siblings(item, warnings, ignored=ignored) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        lost = set(node) - _NOTES - {"$ref", *_DEFINING}
        if lost and not ignored:
            warnings.append(f"not held while it is written: {', '.join(sorted(lost))} beside a circular $ref")
        node = {key: value for key, value in node.items() if key == "$ref" or key in _DEFINING}
    return {
        key: value if key in _DATA else without_siblings(value, warnings, ignored=ignored)
        for key, value in node.items()
    }


def _without(node: Any, keyword: str, keeps: Callable[[object], bool], *, names: bool = False) -> Any:
    """`node` without those of its `keyword` that `keeps` refuses.

    names: its keys are names of members, not keywords.
    """
    if isinstance(node, list):
        return [_without(item, keyword, keeps) for item in node]
    if not isinstance(node, dict):
        return node
    kept: dict[str, Any] = {}
    for key, value in node.items():
        if names:
            kept[key] = _without(value, keyword, keeps)
        elif key in _DATA:
            kept[key] = value
        elif key != keyword or keeps(value):
            kept[key] = _without(value, keyword, keeps, names=key in _NAMED)
    return kept


def _keywords(warning: str) -> str:
    """`Unimplemented keys: ["not"] (3 times)` as `not (3 times)`."""
    found = _UNIMPLEMENTED.match(warning)
    if found is None:
        return "oneOf (held as anyOf)" if warning.startswith("oneOf") else warning
    return ", ".join(json.loads(found["keys"])) + found["times"]
