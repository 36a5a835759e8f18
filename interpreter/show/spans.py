"""What a state says as spans of text with their origins, its branches among them.

The text of a prompt is given an origin by the first generation after it: that knows which tokens at the prompt's end it
computed, with the marks of the chat template between them, and all before was cached. Where a text stands in them is
found by what it says. What stands in front of a selection, or of another backend's generation, has no origin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from branchwise.lang import RoleBegin, RoleEnd, Text

from ..origins import Origin, Piece
from ..outcome import Outcome
from ..session import Completion, Selection, Usage
from ..transcript import Transcript


@dataclass(slots=True)
class Plain:
    """Text of the program: its parts with their origins; None as long as nothing is known of it."""

    parts: list[tuple[str, Origin | None]]


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a call: its tokens, the variable it sets, and what else there is to say in words."""

    name: str | None
    pieces: list[Piece]
    state: str  # "done", "running" or "failed"
    note: str = ""
    others: tuple[str, ...] = ()  # the texts of the other samples


@dataclass(frozen=True, slots=True)
class Role:
    """A turn begins, or, where `name` is None, ends."""

    name: str | None


@dataclass(frozen=True, slots=True)
class Fork:
    branches: list[Story]


@dataclass(frozen=True, slots=True)
class Deeper:
    """So many branches that are not told."""

    count: int


@dataclass(slots=True)
class Story:
    """One conversation: its spans in order, values that no span shows, and the tokens of its calls."""

    spans: list[Plain | Written | Role | Fork | Deeper] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    usages: list[Usage] = field(default_factory=list)
    seconds: float = 0.0  # from the arrival of each call to its end, the longest branch of each fork


Untold: TypeAlias = list[Plain]

MOST_LEVELS = 12
"""Of forks in forks that are told: columns in columns beyond that are too narrow to read."""


def tell(transcript: Transcript, start: int = 0, before: Untold | None = None, levels: int = MOST_LEVELS) -> Story:
    """The story of what is written from entry `start` on; waits for nothing.

    Args:
        before: text in front of it, in other stories, of which no origin is known yet.
        levels: how many forks in forks to tell; what lies deeper is counted.
    """
    story, untold = Story(), list(before or [])
    forks = list(transcript.forks)
    shown = set[int]()
    entries = transcript.entries()
    for index, entry in enumerate([*entries[start:], None], start):
        while forks and forks[0][0] <= index:
            position, branches = forks.pop(0)
            if not levels:
                story.spans.append(Deeper(len(branches)))
                continue
            told = [tell(branch, position, untold, levels - 1) for branch in branches]
            story.spans.append(Fork(told))
            story.usages += [usage for branch in told for usage in branch.usages]
            story.seconds += max((branch.seconds for branch in told), default=0.0)
        match entry:
            case Text(text):
                untold.append(Plain([(text, None)]))
                story.spans.append(untold[-1])
            case RoleBegin(role):
                story.spans.append(Role(role))
            case RoleEnd():
                story.spans.append(Role(None))
            case Outcome():
                shown.add(id(entry))
                _tell_call(story, entry, transcript.name_of(entry), untold)
            case _:
                pass
    for name in transcript.names():
        outcome = transcript.find(name)
        if id(outcome) not in shown and outcome not in entries[:start]:
            story.values[name] = _value(outcome)
    return story


def settled(transcript: Transcript) -> bool:
    """Whether all that is written by now is done, in the branches, too. In a loop: forks of forks cost no stack."""
    family = [transcript]
    for member in family:
        if not all(entry.done for entry in member.entries() if isinstance(entry, Outcome)):
            return False
        family += [branch for _, branches in list(member.forks) for branch in branches]
    return True


def _tell_call(story: Story, outcome: Outcome, name: str | None, untold: Untold) -> None:
    text = outcome.text_so_far()
    if outcome.failure is not None:
        note = str(outcome.failure.exception())
        story.spans.append(Written(name, [Piece(text)], "failed", note))
        return
    if not outcome.done:
        story.spans.append(Written(name, [Piece(text)], "running"))
        return
    result = outcome.result()
    pieces, note, others = [Piece(text)], "", tuple[str, ...]()
    if isinstance(result, Completion):
        story.usages.append(result.usage)
        story.seconds += result.times.total_s or 0.0
        others = tuple(sample.text for sample in result.samples[1:])
        note = f"ended by {result.detail or result.finish_reason}; {result.usage.completion_tokens} tokens"
        if result.origins is not None:
            pieces = result.origins.output(result.text, [(one.logprob, one.top) for one in result.logprobs or ()])
            give_origins(untold, result.origins.prompt())
            untold.clear()
    elif isinstance(result, Selection):
        note = "chosen by score: " + ", ".join(f"{score:.2f}" for score in result.scores)
        pieces = [Piece(text, "chosen")]
        untold.clear()  # a selection computes text in front of it, and does not say how much
    elif result is None:  # said again, or a value of Python's
        again = Plain([(outcome.text(), None)])
        untold.append(again)
        story.spans.append(again)
        return
    story.spans.append(Written(name, pieces, "done", note, others))


def give_origins(untold: Untold, computed: str) -> None:
    """Mark the end of `untold` that `computed` spells as computed, and what stands before it as cached."""
    end = len(computed)
    for span in reversed(untold):
        text = "".join(part for part, _ in span.parts)
        if any(origin is not None for _, origin in span.parts) or not text:
            continue
        found = computed.rfind(text, 0, end)
        if found < 0 and text.strip():
            found = computed.rfind(text.strip(), 0, end)  # templates strip contents
        if found >= 0:
            span.parts, end = [(text, "computed")], found
            continue
        size = next((n for n in range(min(len(text), end), 0, -1) if computed.startswith(text[-n:])), 0)
        split = len(text) - size
        parts: tuple[tuple[str, Origin], ...] = ((text[:split], "cached"), (text[split:], "computed"))
        span.parts = [(part, origin) for part, origin in parts if part]
        end = 0


def hover(piece: Piece) -> str:
    """What is said of a token: its origin, its probability and what else could have stood there."""
    said: list[str] = [piece.origin or "generated"]
    if piece.logprob is not None:
        said.append(f"p = {math.exp(piece.logprob):.3f}")
    return "\n".join([", ".join(said), *(f"{text!r}  {math.exp(logprob):.3f}" for text, logprob in piece.likely)])


def _value(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return "failed"
    return repr(outcome.value()) if outcome.done else "…"
