r"""A pattern as a tree, and the spelling of it that the compiling library is given.

The syntax is Rust's regex syntax for whole texts, without anchors, look-around and back-references.
Reading a pattern here serves two ends: its tree tells how large its automaton will be before anyone
builds it, and its *fenced* spelling is what `outlines.py` compiles. In that spelling no class holds
the two characters of the fence, U+10FFFE and U+10FFFF.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from ..errors import ConstraintError
from ..messages import shortened, shown
from . import charset
from .charset import Charset

FENCE = ("\U0010fffe", "\U0010ffff")
_NO_FENCE = r"\x{10FFFE}\x{10FFFF}"
MAX_NESTING = 100

_REPEAT = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_OPENING = re.compile(r"\((?:\?(?:P?<[^>=!]+>|(?P<flags>[isu]*(?:-[is]+)?)(?P<end>[:)])))?")
_POSIX = re.compile(r"\[:(\^?)([a-z]+):\]")
_CODE_POINT = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]+)\})")
_PROPERTY = re.compile(r"\\[pP](?:\{([^}]*)\}|([A-Za-z]))")
_CONTROLS = {"a": 7, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


@dataclass(frozen=True, slots=True)
class OneOf:
    """One character of a set."""

    chars: Charset


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    branches: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`item`, at least `least` and at most `most` times; None is without end."""

    item: Node
    least: int
    most: int | None


Node: TypeAlias = OneOf | Sequence | Either | Repeat


@dataclass(frozen=True, slots=True)
class Pattern:
    tree: Node
    fenced: str


def parse(pattern: str) -> Pattern:
    """Read `pattern`.

    Raises:
        ConstraintError: it is not of the syntax, or names a property this file does not know.
    """
    return _Parser(pattern).parse()


@dataclass(slots=True)
class _Parser:
    """Reads left to right: `at` is the next character, `out` the fenced spelling of those before it."""

    pattern: str
    at: int = 0
    depth: int = 0
    ignore_case: bool = False
    dot_is_all: bool = False
    out: list[str] = field(default_factory=list)

    def parse(self) -> Pattern:
        tree = self.either()
        if self.at < len(self.pattern):
            self.wrong(f"the ) at position {self.at} closes no group")
        return Pattern(tree, f"{FENCE[0]}(?:{''.join(self.out)}){FENCE[1]}")

    def refuse(self, what: str) -> NoReturn:
        raise ConstraintError(f"{shortened(what)} at position {self.at} of the pattern is not supported.")

    def wrong(self, what: str) -> NoReturn:
        raise ConstraintError(f"the pattern {shown(self.pattern)} cannot be read: {what}.")

    def ahead(self, *texts: str) -> bool:
        return self.pattern.startswith(texts, self.at)

    def take(self, length: int, new: str | None = None) -> str:
        """Move past `length` characters, writing them, or `new` in their place."""
        if self.at + length > len(self.pattern):
            self.wrong("it ends too early")
        taken = self.pattern[self.at : self.at + length]
        self.at += length
        self.out.append(taken if new is None else new)
        return taken

    def either(self) -> Node:
        branches = [self.sequence()]
        while self.ahead("|"):
            self.take(1)
            branches.append(self.sequence())
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def sequence(self) -> Node:
        items = []
        while self.at < len(self.pattern) and not self.ahead("|", ")"):
            items.append(self.quantified())
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def quantified(self) -> Node:
        item = self.item()
        while bounds := self.bounds():
            item = Repeat(item, *bounds)
            if self.ahead("?"):  # lazy: the language is the same
                self.take(1, "")
        return item

    def bounds(self) -> tuple[int, int | None] | None:
        for spelling, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.ahead(spelling):
                self.take(1)
                return least, most
        if not self.ahead("{"):
            return None
        found = _REPEAT.match(self.pattern, self.at)
        if not found:
            self.refuse("the brace")
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        self.take(len(found[0]))
        return least, most

    def item(self) -> Node:
        if self.ahead("("):
            return self.group()
        if self.ahead("["):
            return self.wrapped(self.char_class)
        if self.ahead("."):
            self.take(1, f"[^{'' if self.dot_is_all else chr(92) + 'n'}{_NO_FENCE}]")
            return OneOf(charset.EVERYTHING if self.dot_is_all else charset.negate(charset.NEWLINE))
        if self.ahead("^", "$"):
            self.refuse("the anchor")
        if self.ahead("*", "+", "?", "{"):
            self.wrong(f"the {self.pattern[self.at]} at position {self.at} has nothing to repeat")
        if self.ahead("\\") and self.pattern[self.at + 1 : self.at + 2] in tuple("dDsSwWpP"):
            return self.wrapped(self.escape)
        char = self.char()
        if not charset.intersect(char, charset.EVERYTHING):
            self.wrong(f"no text can hold the character U+{char[0][0]:04X}, which ends at position {self.at}")
        return OneOf(self.cased(char))

    def group(self) -> Node:
        opened = self.at
        found = _OPENING.match(self.pattern, self.at)
        if not found or self.pattern.startswith("?", found.end()):
            self.refuse("the group")
        outside = self.ignore_case, self.dot_is_all
        if found["flags"] is not None:
            on, _, off = found["flags"].partition("-")
            self.ignore_case = "i" in on or (self.ignore_case and "i" not in off)
            self.dot_is_all = "s" in on or (self.dot_is_all and "s" not in off)
        if found["end"] == ")":  # flags for the rest of the group around
            self.take(len(found[0]))
            return Sequence(())
        self.take(len(found[0]), f"(?{found['flags']}:" if found["flags"] else "(?:")
        self.deeper()
        inside = self.either()
        self.depth -= 1
        if not self.ahead(")"):
            self.wrong(f"the group opened at position {opened} is never closed")
        self.take(1)
        self.ignore_case, self.dot_is_all = outside
        return inside

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.wrong(f"there are more than {MAX_NESTING} groups or classes inside each other at position {self.at}")

    def wrapped(self, read: Callable[[], Charset]) -> Node:
        """What `read` reads, without the fence's characters."""
        self.out.append("[")
        chars = read()
        self.out.append(f"--[{_NO_FENCE}]]")
        if not chars:
            self.wrong(f"no character is in the class that ends at position {self.at}")
        return OneOf(chars)

    def cased(self, chars: Charset) -> Charset:
        return charset.fold(chars) if self.ignore_case else chars

    def char(self) -> Charset:
        """A character that stands for itself, or an escape."""
        if self.ahead("\\"):
            return self.escape()
        return self.single(ord(self.pattern[self.at]), 1)

    def single(self, code: int, length: int) -> Charset:
        self.take(length)
        return ((code, code),)

    def escape(self) -> Charset:
        name = self.pattern[self.at + 1 : self.at + 2]
        if name in ("p", "P"):
            return self.property()
        if name in tuple("dDsSwW"):
            self.take(2)
            chars = charset.SPACE if name in "sS" else charset.digits() if name in "dD" else charset.word()
            return charset.negate(chars) if name.isupper() else chars
        if name in ("x", "u", "U"):
            if not (found := _CODE_POINT.match(self.pattern, self.at)):
                self.refuse("the escape")
            return self.single(int(next(digits for digits in found.groups() if digits), 16), len(found[0]))
        if name in _CONTROLS:
            return self.single(_CONTROLS[name], 2)
        if name.isascii() and name and not name.isalnum() and name not in "<>":
            return self.single(ord(name), 2)
        return self.refuse(f"the escape \\{name}")

    def property(self) -> Charset:
        found = _PROPERTY.match(self.pattern, self.at)
        chars = found and charset.category(found[1] or found[2])
        if not found or not chars:
            self.refuse(f"the property {found[0] if found else 'escape'}")
        self.take(len(found[0]))
        return charset.negate(chars) if found[0].startswith("\\P") else chars

    def char_class(self) -> Charset:
        opened = self.at
        self.deeper()
        negated = self.ahead("[^")
        self.take(2 if negated else 1)
        so_far: Charset = ()
        operator = ""
        pieces: list[Charset] = []
        leading = self.at
        while self.ahead("-"):
            pieces.append(self.single(ord("-"), 1))
        if self.ahead("]") and self.at == leading:
            pieces.append(self.single(ord("]"), 1))
        while not self.ahead("]"):
            if self.ahead("&&", "--", "~~"):
                so_far, pieces = self.combined(so_far, operator, pieces), []
                operator = self.take(2)
            else:
                pieces.append(self.class_piece(opened))
        chars = self.combined(so_far, operator, pieces)
        self.take(1)
        self.depth -= 1
        return charset.negate(chars) if negated else chars

    def combined(self, left: Charset, operator: str, pieces: list[Charset]) -> Charset:
        right = self.cased(charset.union(*pieces))
        match operator:
            case "&&":
                return charset.intersect(left, right)
            case "--":
                return charset.intersect(left, charset.negate(right))
            case "~~":
                either, both = charset.union(left, right), charset.intersect(left, right)
                return charset.intersect(either, charset.negate(both))
            case _:
                return right

    def class_piece(self, opened: int) -> Charset:
        if (found := _POSIX.match(self.pattern, self.at)) and (chars := charset.POSIX.get(found[2])):
            self.take(len(found[0]))
            return charset.negate(chars) if found[1] else chars
        if self.ahead("["):
            return self.char_class()
        if self.at >= len(self.pattern):
            self.wrong(f"the class opened at position {opened} is never closed")
        first = self.char()
        if not self.ahead("-") or self.ahead("-]", "--"):
            return charset.intersect(first, charset.EVERYTHING)
        self.take(1)
        last = self.char() if self.at < len(self.pattern) else ()
        if len(first) != 1 or len(last) != 1 or last[0][1] < first[0][0]:
            self.wrong(f"the range that ends at position {self.at} is not between two characters in order")
        return charset.intersect(((first[0][0], last[0][1]),), charset.EVERYTHING)
