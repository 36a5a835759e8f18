r"""The regex dialect of constraints: what may be written, and one spelling for the runtime.

A pattern describes the *whole* text: `yes|no` is these two texts and nothing around them. The syntax
is that of Rust's regex crate, which for what people write daily is Python's. The differences:

- `\d`, `\w` and `\s` are Unicode, as in Python's `re` for strings: `\d` also takes `٣`, which `int()`
  reads as 3. Write `[0-9]` for ASCII. `.` is any character but a newline; `(?s)` makes it any at all.
- Inside a class, `[` opens a class of its own, and `&&`, `--`, `~~` are set operations.
- No look-around, back-references, atomic groups, possessive quantifiers, word boundaries or
  conditionals: they are refused by name. Of the flags, `i`, `s` and `u` are known.
- Greedy or lazy, named or not makes no difference: a text is in the language or it is not.

`^`, `\A`, `$`, `\z` and `\Z` say what holds anyway where nothing can stand before or after them, and
are dropped there; elsewhere they could never hold, or only by chance, and are refused. Python
spellings with an exact twin are turned into it: `{,3}`, a literal `{`, `[\b]`. The empty pattern is
the language of the empty text.

This file checks what can be checked without a tokenizer. It does not know how many states a pattern
needs, nor whether a vocabulary can spell it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from .errors import ConstraintError

MAX_NESTING = 100
MAX_REPEAT = 2**31 - 1

_REPEAT = re.compile(r"\{(?P<lo>[0-9]*)(?P<comma>,(?P<hi>[0-9]*))?\}")
_FLAGS = re.compile(r"\(\?(?P<flags>[A-Za-z-]+)(?P<end>[:)])")
_NAME = re.compile(r"\(\?P?<[A-Za-z_][A-Za-z0-9_.\[\]]*>")
_POSIX = re.compile(r"\[:\^?(alnum|alpha|ascii|blank|cntrl|digit|graph|lower|print|punct|space|upper|word|xdigit):\]")
_CODE_POINT = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\})")
_PROPERTY = re.compile(r"\\[pP](?:\{[A-Za-z0-9_ :=!-]+\}|[A-Za-z])")

_CONTROLS = {"a": 7, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_START_ANCHORS = ("^", r"\A")
_REFUSED_GROUPS = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?>": "an atomic group",
    "(?P=": "a back-reference",
    "(?P>": "recursion",
    "(?R": "recursion",
    "(?&": "recursion",
    "(?#": "a comment",
    "(?(": "a conditional",
    "(?|": "a branch reset",
}


def normalize(pattern: str) -> str:
    """`pattern` in the runtime's spelling: the same language, without anchors.

    Raises:
        ConstraintError: the pattern is not of the dialect; the message names the construct and its position.
    """
    return _Parser(pattern).normalize()


def most_characters(pattern: str) -> int | None:
    """How long the longest text of `pattern` is; None where there is none.

    Raises:
        ConstraintError: as `normalize`.
    """
    return _most(_Parser(pattern).either())


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One character of a set, or nothing at all."""

    consumes: bool


@dataclass(frozen=True, slots=True)
class _Anchor:
    spelling: str
    position: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: list[_Node]


@dataclass(frozen=True, slots=True)
class _Either:
    branches: list[_Node]


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: _Node
    least: int
    most: int


_Node: TypeAlias = _Leaf | _Anchor | _Sequence | _Either | _Repeat


@dataclass(frozen=True, slots=True)
class _Extent:
    """Whether a piece always consumes text, and whether it ever does."""

    always: bool
    ever: bool

    def then(self, other: _Extent) -> _Extent:
        return _Extent(self.always or other.always, self.ever or other.ever)


_NOTHING = _Extent(always=False, ever=False)


def _extent(node: _Node) -> _Extent:
    match node:
        case _Leaf(consumes):
            return _Extent(consumes, consumes)
        case _Anchor():
            return _NOTHING
        case _Sequence(items):
            extents = [_extent(item) for item in items]
            return _Extent(any(e.always for e in extents), any(e.ever for e in extents))
        case _Either(branches):
            extents = [_extent(branch) for branch in branches]
            return _Extent(all(e.always for e in extents), any(e.ever for e in extents))
        case _Repeat(item, least, most):
            inner = _extent(item)
            return _Extent(inner.always and least > 0, inner.ever and most > 0)


def _most(node: _Node) -> int | None:
    match node:
        case _Leaf(consumes):
            return int(consumes)
        case _Anchor():
            return 0
        case _Sequence(items):
            lengths = [_most(item) for item in items]
            return None if None in lengths else sum(filter(None, lengths))
        case _Either(branches):
            lengths = [_most(branch) for branch in branches]
            return None if None in lengths else max(map(int, filter(None, lengths)), default=0)
        case _Repeat(item, _, most):
            once = _most(item)
            if once == 0 or most == 0:
                return 0
            return None if once is None or most == MAX_REPEAT else once * most


def _check_anchors(node: _Node, before: _Extent, after: _Extent) -> None:
    """Refuse each anchor in `node` that something can stand before, or after, of."""
    match node:
        case _Leaf():
            pass
        case _Anchor(spelling, position):
            side = "before" if spelling in _START_ANCHORS else "after"
            beside = before if side == "before" else after
            if beside.always:
                raise ConstraintError(
                    f"the anchor {spelling} at position {position} can never hold: text always stands {side} it."
                )
            if beside.ever:
                raise ConstraintError(
                    f"the anchor {spelling} at position {position} holds only where nothing stands {side} it; "
                    "a pattern describes the whole text, so leave the anchor out."
                )
        case _Sequence(items):
            following = [after]
            for item in reversed(items):
                following.append(_extent(item).then(following[-1]))
            for item, rest in zip(items, reversed(following[:-1]), strict=True):
                _check_anchors(item, before, rest)
                before = before.then(_extent(item))
        case _Either(branches):
            for branch in branches:
                _check_anchors(branch, before, after)
        case _Repeat(item, _, most):
            again = _Extent(always=False, ever=most > 1 and _extent(item).ever)
            _check_anchors(item, before.then(again), after.then(again))


@dataclass(slots=True)
class _Parser:
    """Reads a pattern once, left to right: `at` is the next character, `out` the new spelling of those before."""

    pattern: str
    at: int = 0
    depth: int = 0
    out: list[str] = field(default_factory=list)

    def normalize(self) -> str:
        for position, char in enumerate(self.pattern):
            if "\ud800" <= char <= "\udfff":
                raise ConstraintError(f"the character at position {position} is half of a surrogate pair.")
        tree = self.either()
        if self.at < len(self.pattern):
            raise ConstraintError(f"the ) at position {self.at} closes no group; write \\) for the character.")
        _check_anchors(tree, _NOTHING, _NOTHING)
        return "".join(self.out)

    def refuse(self, what: str, start: int | None = None) -> NoReturn:
        position = self.at if start is None else start
        raise ConstraintError(f"{what} at position {position} is not supported in a constraint.")

    def ahead(self, *texts: str) -> bool:
        return self.pattern.startswith(texts, self.at)

    def take(self, length: int, new: str | None = None) -> str:
        """Move past `length` characters, writing them, or `new` in their place."""
        taken = self.pattern[self.at : self.at + length]
        self.at += len(taken)
        self.out.append(taken if new is None else new)
        return taken

    def either(self) -> _Node:
        branches = [self.sequence()]
        while self.ahead("|"):
            self.take(1)
            branches.append(self.sequence())
        return branches[0] if len(branches) == 1 else _Either(branches)

    def sequence(self) -> _Node:
        items: list[_Node] = []
        while self.at < len(self.pattern) and not self.ahead("|", ")"):
            items.append(self.quantified())
        return _Sequence(items)

    def quantified(self) -> _Node:
        item, repeatable = self.item()
        if (bounds := self.bounds()) is None:
            return item
        start, spelling, least, most = bounds
        if isinstance(item, _Anchor) or not repeatable:
            raise ConstraintError(f"the quantifier {spelling} at position {start} repeats nothing.")
        if self.ahead("+"):
            self.refuse(f"the possessive quantifier {spelling}+", start)
        if self.ahead("?"):
            self.take(1, "")
        second = self.at
        if (again := self.bounds()) is not None:
            raise ConstraintError(
                f"the quantifier {again[1]} at position {second} follows another one; put what it repeats in a group."
            )
        return _Repeat(item, least, most)

    def bounds(self) -> tuple[int, str, int, int] | None:
        """The quantifier here, if there is one: its position, its spelling, the least and the most times."""
        start = self.at
        if self.ahead("*"):
            return start, self.take(1), 0, MAX_REPEAT
        if self.ahead("+"):
            return start, self.take(1), 1, MAX_REPEAT
        if self.ahead("?"):
            return start, self.take(1), 0, 1
        counts = self.counts()
        if counts is None:
            return None
        least = int(counts["lo"] or "0")
        most = least if counts["comma"] is None else int(counts["hi"] or MAX_REPEAT)
        if least > most:
            raise ConstraintError(f"the repeat {counts[0]} at position {start} has its bounds reversed.")
        if most > MAX_REPEAT:
            raise ConstraintError(f"the repeat {counts[0]} at position {start} is larger than {MAX_REPEAT}.")
        return start, self.take(len(counts[0]), counts[0].replace("{,", "{0,")), least, most

    def counts(self) -> re.Match[str] | None:
        """The `{2}`, `{2,}`, `{,3}` or `{2,3}` here; any other brace is a character."""
        found = _REPEAT.match(self.pattern, self.at)
        return found if found and found[0] != "{}" else None

    def item(self) -> tuple[_Node, bool]:
        """One thing that a quantifier may follow, and whether it really may."""
        start = self.at
        if self.ahead("("):
            return self.group()
        if self.ahead("["):
            self.char_class()
        elif self.ahead("^", "$"):
            return _Anchor(self.take(1, ""), start), False
        elif self.ahead(r"\A", r"\z", r"\Z"):
            return _Anchor(self.take(2, ""), start), False
        elif self.ahead("\\"):
            self.escape()
        elif self.ahead("*", "+", "?") or self.counts():
            bounds = self.bounds()
            assert bounds is not None, self.pattern
            raise ConstraintError(f"the quantifier {bounds[1]} at position {start} repeats nothing.")
        elif self.ahead("{"):
            self.take(1, r"\{")
        else:
            self.take(1)
        return _Leaf(consumes=True), True

    def group(self) -> tuple[_Node, bool]:
        start = self.at
        for opening, what in _REFUSED_GROUPS.items():
            if self.ahead(opening):
                self.refuse(f"{what} {opening}")
        if found := _FLAGS.match(self.pattern, start):
            self.flags(found)
            self.take(len(found[0]))
            if found["end"] == ")":
                return _Leaf(consumes=False), False
        elif found := _NAME.match(self.pattern, start):
            self.take(len(found[0]), "(")
        elif self.ahead("(?:"):
            self.take(3)
        elif self.ahead("(?"):
            self.refuse(f"the group {self.pattern[start : start + 3]}")
        else:
            self.take(1)
        return self.rest_of_group(start), True

    def flags(self, found: re.Match[str]) -> None:
        for flag in found["flags"].removeprefix("-").replace("-", "", 1):
            if flag not in "isu":
                self.refuse(f"the flag {flag} in {found[0]}")
        on, _, off = found["flags"].partition("-")
        if "u" in off:
            self.refuse(f"switching Unicode off in {found[0]}")
        if not on + off or found["flags"].endswith("-"):
            self.refuse(f"the group {found[0]}")

    def rest_of_group(self, start: int) -> _Node:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise ConstraintError(f"the group opened at position {start} is more than {MAX_NESTING} groups deep.")
        inside = self.either()
        if not self.ahead(")"):
            raise ConstraintError(f"the group opened at position {start} is never closed.")
        self.take(1)
        self.depth -= 1
        return inside

    def escape(self, *, in_class: bool = False) -> int | None:
        """Take one escape; its code point, or None if it stands for a set of characters."""
        start, name = self.at, self.pattern[self.at + 1 : self.at + 2]
        if not name:
            raise ConstraintError(f"the backslash at position {start} escapes nothing; write \\\\ for the character.")
        if in_class and name == "b":
            self.take(2, r"\x08")
            return 8
        if name in "bB<>":
            self.refuse(f"the word boundary \\{name}")
        if name in "123456789":
            self.refuse(f"the back-reference \\{name}")
        if name in "dDsSwW":
            self.take(2)
            return None
        if name in "pP":
            self.property()
            return None
        if name in "xuU":
            return self.code_point()
        if name in _CONTROLS:
            self.take(2)
            return _CONTROLS[name]
        if name.isascii() and not name.isalnum():
            self.take(2)
            return ord(name)
        raise ConstraintError(f"the escape \\{name} at position {start} is unknown.")

    def property(self) -> None:
        found = _PROPERTY.match(self.pattern, self.at)
        if not found:
            raise ConstraintError(f"the escape at position {self.at} names no property; write \\p{{L}}.")
        self.take(len(found[0]))

    def code_point(self) -> int:
        found = _CODE_POINT.match(self.pattern, self.at)
        if not found:
            raise ConstraintError(f"the escape at position {self.at} is incomplete; write \\x41, \\u0041 or \\x{{41}}.")
        value = int(next(digits for digits in found.groups() if digits), 16)
        if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
            raise ConstraintError(f"the escape {found[0]} at position {self.at} is no character.")
        self.take(len(found[0]))
        return value

    def char_class(self) -> None:
        start = self.at
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise ConstraintError(f"the class opened at position {start} is more than {MAX_NESTING} levels deep.")
        self.take(2 if self.ahead("[^") else 1)
        leading = self.at
        while self.ahead("-"):
            self.take(1)
        if self.ahead("]") and self.at == leading:
            self.take(1)
        while not self.ahead("]"):
            if self.at >= len(self.pattern):
                raise ConstraintError(
                    f"the class opened at position {start} is never closed; inside a class write \\[ for the character."
                )
            if found := _POSIX.match(self.pattern, self.at):
                self.take(len(found[0]))
            elif self.ahead("["):
                self.char_class()
            elif self.ahead("&&", "--", "~~"):
                self.take(2)
            else:
                self.class_range()
        self.take(1)
        self.depth -= 1

    def class_range(self) -> None:
        """A character or a range of them; a dash is one where no range can be meant."""
        start = self.at
        first = self.class_char()
        if not self.ahead("-") or self.ahead("-]", "--"):
            return
        if first is None:
            raise ConstraintError(f"the range at position {start} begins with a set; write \\- for the character.")
        self.take(1)
        if self.at >= len(self.pattern):
            return
        last = None if self.ahead("[") else self.class_char()
        spelling = self.pattern[start : self.at]
        if last is None:
            raise ConstraintError(f"the range at position {start} ends with a set; write \\- for the character.")
        if last < first:
            raise ConstraintError(f"the range {spelling} at position {start} is reversed.")

    def class_char(self) -> int | None:
        if self.ahead("\\"):
            return self.escape(in_class=True)
        return ord(self.take(1))
