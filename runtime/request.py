"""One sequence that is being computed: what it is, how far it is, and what it may still become."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from .constrain import State as ConstraintState
from .healing import Held
from .penalties import Repeated
from .sampling import SamplingParams
from .stops import StopMatcher
from .text import Detokenizer
from .tree import Node, RadixTree

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that will not be taken back."""

    text: str


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token given those before it, as the model says it: before temperature, penalties
    and constraints. `top` are the likeliest tokens in its place with theirs, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since a request arrived.

    waiting_s: until the first step that it took part in began.
    first_token_s: until its first token was there; None if it has none.
    total_s: until its end.
    """

    waiting_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a generation.

    `tokens` are all that were sampled. Those before `kept` are in `text` whole; a stop string can cut the next one in
    two, and then `tail` is the part of its text that counts. A character that was only begun is not in the text, nor
    are its tokens kept. If the seam was healed, the first token stands for the prompt's last `healed` tokens, too, and
    only what it says after them is in the text. `detail` says what ended it: "eos", the stop (string or pattern) in
    quotes, "constraint", "max_tokens", "context" (the model's positions), "slots" (the pool is full), "timeout",
    "cancelled".
    """

    text: str
    tokens: tuple[int, ...]
    kept: int
    tail: str
    finish_reason: FinishReason
    detail: str
    complete: bool  # the text fulfils its constraint, if there is one
    prompt_tokens: int
    hit_tokens: int
    exact: bool = True          # its constraint was held in full while it was written; otherwise `warnings` say why
    warnings: tuple[str, ...] = ()
    violation: str = ""         # what is wrong with a complete text whose constraint was not exact
    forced_tokens: int = 0      # those of `tokens` that a constraint forced
    times: Times = Times()
    healed: int = 0
    forced_at: tuple[int, ...] = ()  # which of `tokens` a constraint forced
    healed_bytes: int = 0       # bytes of the first token that were in the prompt already
    logprobs: tuple[Logprob, ...] | None = None  # of each of `tokens`, if asked for
    prompt_logprobs: tuple[Logprob, ...] | None = None  # of the prompt's last tokens, likewise
    pinned: Node | None = None  # where the prompt ends, if it was to be pinned


_ids = itertools.count()


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A generation, or the scoring of a text that is given.

    The sequence is `tokens`: [0, path_len) is the path to `node` in the tree, [path_len, computed) its `tail`, and
    [computed, len) is pending. In a step that computes the last of them, `draft` comes along and counts as computed
    until it is settled: samples that agree with it need no step of their own. While `node` is None nothing is locked
    or held: the request waits, and finds its path again when it is admitted.
    """

    tokens: array[int]
    num_prompt: int                 # tokens[:num_prompt] were given and stay, the rest is sampled
    on_done: Callable[[Any], None]  # once: a Result, a list of log-probabilities, or an Exception
    on_delta: Callable[[Delta], None] | None = None
    scoring: bool = False           # nothing is generated
    logprobs_from: int | None = None  # log-probabilities are wanted of tokens[logprobs_from:]
    top_logprobs: int = 0           # and of so many others in the place of each
    max_tokens: int = 0             # to sample at most
    min_tokens: int = 0             # before these nothing ends the text but a stop string
    sampling: SamplingParams = field(default_factory=SamplingParams)
    repeated: Repeated | None = None
    ignore_eos: bool = False
    stop_ids: frozenset[int] = frozenset()  # tokens that end the text and are not in it
    namespace: Hashable = None      # requests of different ones share nothing
    priority: int = 0               # higher ones are admitted first, sent back last, and kept longer
    routing_key: Hashable = None
    deadline: float | None = None   # on the clock of `time.monotonic`
    keep_pinned: bool = False       # pin its prompt when it is done
    forced: deque[int] = field(default_factory=deque)  # tokens that must come next, as the constraint says
    likely: tuple[int, ...] = ()    # and those that are likely to come after them
    held: Held | None = None        # the end of the prompt, after `tokens`, as long as it is not decided
    constraint: ConstraintState | None = None
    closes: bool = False            # `max_tokens` shall not cut off what the constraint describes
    detokenizer: Detokenizer = field(default_factory=lambda: Detokenizer(()))
    stops: StopMatcher = field(default_factory=StopMatcher)
    _start: Detokenizer = field(init=False)

    id: int = field(default_factory=lambda: next(_ids))  # in order of arrival
    node: Node | None = None
    tail: Node | None = None        # its tokens that fill no page yet, and its draft, below `node`
    draft: array[int] = field(default_factory=lambda: array("i"))  # what is likely to follow `tokens`
    drafted: int = 0                # tokens of it that are in the tail, in the step in progress
    accepted: int = 0               # those of them that were sampled, too
    replaced: Held | None = None    # what was held back, if the first sampled token stands for it, too
    computed: int = 0
    hit_len: int | None = None      # prompt tokens found in the tree when first admitted
    best_hit: int | None = None     # those that it could have found there at best, whatever went before it
    counted: bool = False           # these two numbers are in the statistics
    pieces: list[str] = field(default_factory=list)  # the text so far, as it became certain
    logprobs: list[Logprob] = field(default_factory=list)
    arrived: float = 0.0            # on the same clock, like the next two
    started: float | None = None
    first_token: float | None = None
    forced_at: list[int] = field(default_factory=list)  # which of the sampled tokens were forced instead
    pinned: Node | None = None
    failures: int = 0               # steps that failed with it
    finished: bool = False

    def __post_init__(self) -> None:
        self._start = self.detokenizer.copy()

    @property
    def text(self) -> str:
        """What is certain so far."""
        return "".join(self.pieces)

    @property
    def path_len(self) -> int:
        return self.computed - (len(self.tail) if self.tail else 0)

    def settle(self, tree: RadixTree) -> None:
        """After a step: what was accepted of the draft counts, and the slots of the rest are free again."""
        if self.drafted:
            assert self.node is not None and self.tail is not None
            refused = self.drafted - self.accepted
            self.node, self.tail = tree.keep(self.node, self.tail, len(self.tail) - refused)
            self.computed -= refused
            self.draft = array("i", self.held.tokens if self.held else ())
            self.drafted = self.accepted = 0

    def drop_tail(self, tree: RadixTree) -> None:
        """Give the tail back; its tokens are pending again."""
        if self.tail is not None:
            self.computed -= len(self.tail)
            tree.drop_tail(self.tail)
            self.tail, self.drafted, self.accepted = None, 0, 0

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt as it was given."""
        seam = self.held or self.replaced
        return self.num_prompt + (len(seam.tokens) if seam else 0)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def first_wanted(self) -> int:
        """The first position whose logits are still wanted."""
        return len(self.tokens) - 1 if self.logprobs_from is None else self.logprobs_from - 1 + len(self.logprobs)

    @property
    def end(self) -> int:
        """Where computing stops for now: nothing follows the last token of a text that is only scored."""
        return len(self.tokens) - self.scoring

    def heal(self, token: int) -> bool:
        """`token` was sampled in the place of the first that is held back; whether that one stays, and is prompt again.

        If not, it replaces all that are held back, and is the first that was generated.
        """
        assert self.held is not None, f"request {self.id}: nothing is held back"
        if token != self.held.tokens[0]:
            self.held, self.replaced = None, self.held
            return False
        self.tokens.append(token)
        self.num_prompt += 1
        self.held = self.held.rest()
        return True

    def look_ahead(self) -> None:
        """Ask the constraint what must come next, unless that is known."""
        if self.constraint is not None and self.held is None and not self.forced:
            ahead = self.constraint.forced_tokens()
            self.forced.extend(ahead.certain)
            self.likely = ahead.draft

    def take(self, token: int) -> str:
        """The text that became certain with a sampled `token`, which is in `tokens`. Advances the constraint."""
        seam = self.replaced if self.num_sampled == 1 else None
        if self.constraint is not None:
            allowed = seam.advance(self.constraint, token) if seam else self.constraint.advance(token)
            assert allowed, f"request {self.id}: token {token} was allowed and then refused"
        return self._add(self.stops.push(self.detokenizer.push(token, skip=seam.size if seam else 0)))

    def take_rest(self) -> str:
        """The text that was held back, now that nothing follows; a character that was only begun is left out."""
        return self._add(self.stops.flush())

    def result(self, reason: FinishReason, detail: str) -> Result:
        """What became of it, now; the text is final."""
        now = time.monotonic()
        times = Times(
            waiting_s=(self.started or now) - self.arrived,
            first_token_s=None if self.first_token is None else self.first_token - self.arrived,
            total_s=now - self.arrived,
        )
        sampled = tuple(self.tokens[self.num_prompt :])
        stopped = self.stops.matched is not None
        kept, tail = self._cut() if stopped or self.detokenizer.copy().flush() else (len(sampled), "")
        return Result(
            text=self.text,
            tokens=sampled,
            kept=kept,
            tail=tail,
            finish_reason=reason,
            detail=detail,
            complete=self.constraint is None or (self.constraint.is_complete and not stopped),
            prompt_tokens=self.prompt_len,
            hit_tokens=self.hit_len or 0,
            forced_tokens=len(self.forced_at),
            forced_at=tuple(self.forced_at),
            healed_bytes=self.replaced.size if self.replaced else 0,
            times=times,
            healed=len(self.replaced.tokens) if self.replaced and kept else 0,
            logprobs=self._logprobs(self.num_prompt, len(self.tokens)),
            prompt_logprobs=self._logprobs(0, self.num_prompt),
            pinned=self.pinned,
        )

    def _logprobs(self, first: int, end: int) -> tuple[Logprob, ...] | None:
        """Those of tokens [first, end) that there are; None if none were asked for."""
        if self.logprobs_from is None:
            return None
        return tuple(self.logprobs[max(0, first - self.logprobs_from) : max(0, end - self.logprobs_from)])

    def _add(self, text: str) -> str:
        if text:
            self.pieces.append(text)
        return text

    def _cut(self) -> tuple[int, str]:
        """How many sampled tokens lie within the text whole, and the text that is left over."""
        stream, done = self._start, ""
        kept, kept_text, length = 0, "", len(self.text)
        for count, token in enumerate(self.tokens[self.num_prompt :], 1):
            done += stream.push(token, skip=self.replaced.size if self.replaced and count == 1 else 0)
            if len(done) > length:
                break
            if not stream.copy().flush():  # no character is half done
                kept, kept_text = count, done
        return kept, self.text[len(kept_text) :]
