"""How large the automaton of a pattern becomes, before anyone builds it.

The compiling library has no limits and cannot be stopped, so a pattern is first made deterministic
here: over classes of characters instead of bytes and tokens, which is cheap, and under a budget that
ends the work as soon as it is spent. Like the library, a state is the *ordered* list of the places in
the pattern where the text may be, and repeats are written out the way it does. States inside a
character of several bytes are counted, not made.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import ConstraintError
from .charset import Charset
from .pattern import Either, Node, OneOf, Repeat, Sequence
from .vocab import Vocab

# Measured on one slow core. A state costs a look at every token; an edge, a token allowed in a state, one table entry.
_SECONDS_PER_STATE_AND_TOKEN = 10e-9
_SECONDS_PER_EDGE = 120e-9
BYTES_PER_EDGE = 12

_CONTINUATION = (1 << 0xC0) - (1 << 0x80)  # the bytes 0x80 to 0xBF as bits

_Span: TypeAlias = tuple[int, int, int]  # first and last character, and what they mean


class OverBudget(ConstraintError):
    """The automaton would be larger than it may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What one compilation may cost; `max_work` bounds the estimate itself, `max_places` its input."""

    max_seconds: float = 5.0
    max_bytes: int = 1 << 30
    max_work: int = 3_000_000
    max_places: int = 20_000


@dataclass(slots=True)
class Estimate:
    """The size of an automaton over a vocabulary of `vocab_size` tokens; edges are an upper bound."""

    vocab_size: int
    states: int = 0
    edges: int = 0

    @property
    def seconds(self) -> float:
        return self.states * self.vocab_size * _SECONDS_PER_STATE_AND_TOKEN + self.edges * _SECONDS_PER_EDGE

    @property
    def nbytes(self) -> int:
        return self.edges * BYTES_PER_EDGE


def estimate(tree: Node, vocab: Vocab, budget: Budget) -> Estimate:
    """The size of the automaton of `tree` over `vocab`.

    Raises:
        OverBudget: the automaton, or finding out its size, is over `budget`.
    """
    places = _count_places(tree)
    if places > budget.max_places:
        raise OverBudget(
            f"the constraint is too large: with its repeats written out it has {places} places, "
            f"at most {budget.max_places} can be compiled. Shorten its bounded repeats."
        )
    automaton = _Automaton()
    start = automaton.add(tree, automaton.place(None, ()))
    return _Determinizer(automaton, vocab, budget).run(start)


def _count_places(node: Node) -> int:
    """The characters of `node` with its repeats written out; a large class counts for several."""
    match node:
        case OneOf(chars):
            return 1 + len(chars) // 8
        case Sequence(items) | Either(items):
            return 1 + sum(_count_places(item) for item in items)
        case Repeat(item, least, most):
            return _count_places(item) * max(1, least if most is None else most)


def _may_be_empty(node: Node) -> bool:
    match node:
        case OneOf():
            return False
        case Sequence(items):
            return all(map(_may_be_empty, items))
        case Either(branches):
            return any(map(_may_be_empty, branches))
        case Repeat(item, least, _):
            return least == 0 or _may_be_empty(item)


@dataclass(slots=True)
class _Automaton:
    """Places in a pattern: each waits for one of `sets`, or forks (None) to its exits in order of preference."""

    waits: list[int | None] = field(default_factory=list)
    exits: list[tuple[int, ...]] = field(default_factory=list)
    sets: dict[Charset, int] = field(default_factory=dict)

    def place(self, waits: int | None, exits: tuple[int, ...]) -> int:
        self.waits.append(waits)
        self.exits.append(exits)
        return len(self.waits) - 1

    def add(self, node: Node, then: int) -> int:
        """Add `node`, to be followed by the place `then`; where it begins."""
        match node:
            case OneOf(chars):
                return self.place(self.sets.setdefault(chars, len(self.sets)), (then,))
            case Sequence(items):
                for item in reversed(items):
                    then = self.add(item, then)
                return then
            case Either(branches):
                return self.place(None, tuple(self.add(branch, then) for branch in branches))
            case Repeat(item, least, most):
                entry = then
                if most is None:
                    loop = self.place(None, ())
                    body = self.add(item, loop)
                    self.exits[loop] = (body, then)
                    if least:
                        entry, least = body, least - 1
                    else:  # what may be empty is repeated as (item+)?
                        entry = self.place(None, (body, then)) if _may_be_empty(item) else loop
                else:
                    for _ in range(most - least):
                        entry = self.place(None, (self.add(item, entry), then))
                for _ in range(least):
                    entry = self.add(item, entry)
                return entry


@dataclass(frozen=True, slots=True)
class _Fan:
    """What leaves any state that waits for the same sets."""

    masks: tuple[int, ...]  # the sets that one character can be in at once, as bits
    inner: int  # states inside a character
    edges: int  # tokens that begin where this state is, or inside one of the characters


class _Determinizer:
    """Makes an automaton deterministic, counting, until it is done or the budget is spent."""

    def __init__(self, automaton: _Automaton, vocab: Vocab, budget: Budget) -> None:
        self._automaton = automaton
        self._budget = budget
        self._size = Estimate(vocab.size)
        self._work = 0
        self._spans = _partition(list(automaton.sets))
        self._spans_of: list[list[int]] = [[] for _ in automaton.sets]
        for number, (_, _, mask) in enumerate(self._spans):
            for index in _bits(mask):
                self._spans_of[index].append(number)
                self._work += 1
            self._check()
        alphabet = _first_bytes(self._spans)
        if self._spans and self._spans[-1][1] > 0x7F:
            alphabet |= _CONTINUATION
        self._starting = vocab.count_first_bytes(alphabet)  # how many tokens begin with each byte
        self._continuing = sum(self._starting[byte] for byte in _bits(_CONTINUATION))
        self._fans: dict[int, _Fan] = {}

    def run(self, start: int) -> Estimate:
        first = self._closure([start])
        seen, waiting = {first}, [first]
        while waiting:
            state = waiting.pop()
            waits = [self._automaton.waits[place] for place in state]
            mask = 0
            for index in waits:
                mask |= 0 if index is None else 1 << index
            fan = self._fan(mask)
            self._size.states += 1 + fan.inner
            self._size.edges += fan.edges
            self._check()
            for sets in fan.masks:
                targets = [
                    self._automaton.exits[place][0]
                    for place, index in zip(state, waits, strict=True)
                    if index is not None and sets >> index & 1
                ]
                self._work += len(state)
                following = self._closure(targets)
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return self._size

    def _closure(self, places: list[int]) -> tuple[int, ...]:
        """The places reached from `places` without a character, most preferred first.

        The library keeps the forks among them too: states that differ in these alone are two.
        """
        reached: dict[int, None] = {}
        stack = places[::-1]
        while stack:
            place = stack.pop()
            if place not in reached:
                reached[place] = None
                if self._automaton.waits[place] is None:
                    stack.extend(reversed(self._automaton.exits[place]))
        self._work += len(reached)
        return tuple(reached)

    def _fan(self, mask: int) -> _Fan:
        if mask not in self._fans:
            numbers = sorted({number for index in _bits(mask) for number in self._spans_of[index]})
            spans = [(low, high, sets & mask) for low, high, sets in (self._spans[number] for number in numbers)]
            self._work += len(spans)
            inner = _count_inner(spans)
            edges = sum(self._starting[byte] for byte in _bits(_first_bytes(spans))) + inner * self._continuing
            self._fans[mask] = _Fan(tuple({sets for _, _, sets in spans}), inner, edges)
        return self._fans[mask]

    def _check(self) -> None:
        size, budget = self._size, self._budget
        if size.seconds > budget.max_seconds or size.nbytes > budget.max_bytes or self._work > budget.max_work:
            raise OverBudget(
                f"the constraint is too large: more than {size.states} states over a vocabulary of {size.vocab_size} "
                f"tokens would pass {budget.max_seconds:g} s or {budget.max_bytes >> 20} MiB to compile. "
                "Shorten its bounded repeats, or use narrower classes in them."
            )


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def _first_bytes(spans: list[_Span]) -> int:
    """The bytes, as bits, that the characters of `spans` begin with in UTF-8."""
    found = 0
    for low, high, _ in spans:
        first, last = chr(low).encode()[0], chr(high).encode()[0]
        found |= (1 << last + 1) - (1 << first)
    return found


def _partition(sets: list[Charset]) -> list[_Span]:
    """The characters of all `sets`, cut wherever one begins or ends, with the sets (as bits) each piece is in."""
    switches: dict[int, int] = {}
    for index, charset in enumerate(sets):
        for low, high in charset:
            switches[low] = switches.get(low, 0) ^ 1 << index
            switches[high + 1] = switches.get(high + 1, 0) ^ 1 << index
    spans, mask, start = [], 0, 0
    for edge in sorted(switches):
        if mask:
            spans.append((start, edge - 1, mask))
        mask, start = mask ^ switches[edge], edge
    return spans


def _count_inner(spans: list[_Span]) -> int:
    """How many states lie between the first and the last byte of the characters of `spans`, equal ones shared."""
    nodes: dict[object, int] = {}

    def node(key: object) -> int:
        return nodes.setdefault(key, len(nodes))

    def full(bits: int, meaning: int) -> int:
        return node((bits, meaning, full(bits - 6, meaning) if bits > 6 else None))

    def block(first: int, bits: int) -> int | None:
        """The state from which `bits` more bits, six a byte, lead to the characters from `first` on."""
        last = first + (1 << bits) - 1
        inside = []
        for at in range(bisect_left(ends, first), len(same_length)):
            low, high, meaning = same_length[at]
            if low > last:
                break
            inside.append((max(low, first) - first, min(high, last) - first, meaning))
        if not inside:
            return None
        if inside[0][:2] == (0, last - first):
            return full(bits, inside[0][2])
        if bits == 6:
            return node(tuple(inside))
        return node(tuple(block(first + (part << bits - 6), bits - 6) for part in range(64)))

    for first, last, bits in ((0x80, 0x7FF, 6), (0x800, 0xFFFF, 12), (0x10000, 0xFFFFF, 18)):
        same_length = [(max(low, first), min(high, last), sets) for low, high, sets in spans if high >= first]
        same_length = [span for span in same_length if span[0] <= span[1]]
        ends = [high for _, high, _ in same_length]
        for start in range(first >> bits << bits, last + 1, 1 << bits):
            block(start, bits)
    return len(nodes)
