"""One request for several calls: what a model wrote past a call's stop, and whether the program says the same.

A template says `"Name:" + gen(stop="\\n") + "\\nJob:" + gen(stop="\\n")`. A model that has seen its pattern writes the
constant text between the calls itself, so the text of the first request holds the answer to the second call.
(Zheng et al., "SGLang", 2024, section 4.3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from branchwise.lang import Gen, GenOptions


@dataclass(frozen=True, slots=True)
class Ahead:
    """Text that the model wrote after the prompt, and whether the model ended it itself.

    `offsets` are where its tokens begin, `num_tokens` how many it has.
    """

    text: str
    ended: bool
    options: GenOptions  # that it was written with, without what says where a call ends
    offsets: tuple[int, ...]

    def past(self, text: str) -> Ahead | None:
        """What is left when the program says `text`; None if the model wrote something else, or not so far."""
        return self.cut(len(text)) if self.text.startswith(text) else None

    def cut(self, end: int) -> Ahead:
        """What is left after `end` characters."""
        return replace(self, text=self.text[end:], offsets=tuple(at - end for at in self.offsets if at >= end))

    def answer(self, gen: Gen) -> tuple[str, str] | None:
        """The text of `gen` and what ends it, if what is here holds all of it; else None."""
        options = gen.options
        if how(options) != self.options:
            return None
        stops = [(at, stop) for stop in options.stop or () if (at := self.text.find(stop)) >= 0]
        end, stop = min(stops, key=lambda found: found[0], default=(len(self.text), ""))
        if not stop and not self.ended:
            return None  # it may go on
        num_tokens = sum(at < end for at in self.offsets)
        if self.offsets and not num_tokens and end:
            num_tokens = 1
        return None if num_tokens > (options.max_tokens or 0) else (self.text[:end], repr(stop) if stop else "eos")


def how(options: GenOptions) -> GenOptions:
    """What decides what is written, apart from where it ends."""
    return replace(options, max_tokens=None, stop=None, heal=None, on_truncate=None)


def worth(options: GenOptions) -> bool:
    """Whether a call's request may write on: its text alone says where it ends, and nothing else is asked."""
    plain = not options.constrained and not options.return_logprob and (options.n or 1) == 1
    return plain and bool(options.stop) and not options.ignore_eos and not options.min_tokens


def token_offsets(text: str, pieces: Sequence[str]) -> tuple[int, ...] | None:
    """Where each token begins; None if they are not the pieces of the text."""
    if "".join(pieces) != text:
        return None
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(piece)
    return tuple(offsets)
