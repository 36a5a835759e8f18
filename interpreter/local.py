"""Sessions over the runtime in this process: where operations become tokens, and results text.

The only file that knows both vocabularies, the program's and the runtime's.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from branchwise import runtime
from branchwise.lang import Gen, GenOptions, Plan, RoleBegin, RoleEnd, Select, Text, Tools, Trace
from branchwise.lang.choices import decide
from branchwise.lang.options import checked_defaults
from branchwise.lang.regex import normalize

from . import tools
from .chat import ChatTemplate, Item, Loose, Schemas, Turn, compose
from .encode import Encoder, TokenStream, protect, unescape
from .errors import ChatError
from .origins import Origins
from .plan import make_plan
from .session import Cancel, Completion, Delta, Listener, Segment, Selection, Times, TokenLogprob, Usage


class Engine(runtime.Engine):
    """A model in this process, ready to run programs."""

    def __init__(
        self, model: str | Path = "smollm2-135m", *, defaults: Mapping[str, object] | None = None, **options: Any
    ) -> None:
        """Load a model and start.

        Args:
            defaults: options of `gen` that hold where neither call, run nor function says otherwise.
            options: see `runtime.Engine`.
        """
        self.defaults: GenOptions = checked_defaults("Engine(defaults=...)", {} if defaults is None else defaults)
        super().__init__(model, **options)
        tokenizer = self.tokenizer
        self.encoder: Encoder = Encoder(tokenizer)
        self.template: ChatTemplate = ChatTemplate(
            tokenizer.chat_template,
            tool_template=tokenizer.tool_template,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
        )

    def open_session(self) -> LocalSession:
        """A new, empty conversation."""
        return LocalSession(self, (), TokenStream(), (), plain=False)

    def prepare(self, gen: Gen) -> None:
        """Begin to compile what constrains `gen`, if something does."""
        if not gen.options.constrained:
            return
        with suppress(runtime.EngineClosed):  # said again, and heard, when it is asked for
            self.compile(generate_params(gen))

    def plan(self, traces: Sequence[Trace]) -> Plan:
        """What these traces would ask of this model, one after the other, from an empty cache."""
        return make_plan(self, traces)

    def forced(self, gen: Gen) -> tuple[str, bool]:
        """What the constraint of `gen` makes it begin with, and whether that is all of it. Waits for the constraint."""
        return self.forced_text(generate_params(gen))


HELD_SHARE = 8
"""What is held for a batch takes at most one part in so many of the slots."""


class LocalSession:
    """One conversation as items of text and what of them has become tokens already.

    Between operations it holds no slots: its tokens are found in the tree again by the next one.
    """

    def __init__(
        self, engine: Engine, items: tuple[Item, ...], stream: TokenStream, path: tuple[int, ...], *, plain: bool
    ) -> None:
        self._engine = engine
        self._items = items
        self._stream = stream
        self._path = path  # which fork of which fork this is: branches with equal seeds draw differently
        self._plain = plain  # whether what was written last is plain text, in which no control token can begin
        self._num_forks = 0
        self._handles: tuple[runtime.Handle, ...] = ()  # of the last operation

    def append(self, segment: Segment) -> None:
        match segment:
            case Text(text, control):
                last = self._last()
                inside = isinstance(last, Turn) and last.open
                plain = inside if control is None else not control
                self._write(self._following(text, plain=plain), plain=plain)
            case RoleBegin(role, fields):
                escape = self._engine.encoder.escape
                said = tools.each_text(_arguments_read(json.loads(fields or "{}")), escape)
                self._items = (*self._items, Turn(escape(role), "", open=True, fields=said))
            case RoleEnd(role):
                last = self._last()
                assert isinstance(last, Turn) and last.open, f"{role} ends but {last} is open"
                self._items = (*self._items[:-1], replace(last, open=False))
            case Tools(schemas):
                escaped = tools.each_text(json.loads(schemas), self._engine.encoder.escape)
                self._items = (*self._items, Schemas(escaped))

    def generate(self, gen: Gen, listener: Listener[Completion]) -> Cancel:
        prompt = self.prompt()
        params, count = generate_params(gen), gen.options.n or 1
        plain_bytes = self.plain_bytes()
        results: list[runtime.Result | Exception | None] = [None] * count

        def on_done(sample: int, result: runtime.Result | Exception) -> None:
            results[sample] = result
            if all(r is not None for r in results):
                done = [r for r in results if r is not None]
                guarded(listener, lambda: listener.on_done(self._completed(prompt, done)))

        handle = self._engine.start(
            prompt,
            params,
            n=count,
            path=self._path,
            plain_bytes=plain_bytes,
            on_delta=lambda sample, delta: listener.on_delta(Delta(delta.text, sample)),
            on_done=on_done,
        )
        self._handles = (handle,)
        return handle.cancel

    def prepare(self, gen: Gen) -> None:
        self._engine.prepare(gen)

    def select(self, select: Select, listener: Listener[Selection]) -> Cancel:
        prompt = self.prompt()
        texts, healed, tokens = self.choices(select, prompt)
        starts = [prompt[: len(prompt) - healed]]
        if select.method == "unconditional_likelihood_normalized":
            starts.append(self._engine.beginning)
        found: list[list[list[float]] | Exception] = [[] for _ in starts]
        missing = len(starts)

        def on_done(number: int, scores: list[list[float]] | Exception) -> None:  # on one thread
            nonlocal missing
            found[number] = scores
            missing -= 1
            if not missing:
                guarded(listener, lambda: listener.on_done(self._selected(select, texts, tokens, healed, found)))

        self._handles = tuple(
            self._engine.start_score(start, tokens, on_done=partial(on_done, number))
            for number, start in enumerate(starts)
        )
        return self._cancel

    def fork(self, count: int) -> list[LocalSession]:
        first = self._num_forks
        self._num_forks += count
        return [
            LocalSession(self._engine, self._items, self._stream, (*self._path, number), plain=self._plain)
            for number in range(first, first + count)
        ]

    def hold(self) -> Callable[[], None]:
        """Keep the tokens of what was written from eviction, if they take no more than an eighth of the slots: a pin
        takes room from everybody."""
        try:
            tokens = self.prompt()
        except ChatError:  # a template may refuse half a conversation
            return lambda: None
        if not tokens or len(tokens) > self._engine.num_slots // HELD_SHARE:
            return lambda: None
        return self._engine.start_pin(tokens).release

    def close(self) -> None:
        """Stop what is running; what was computed is the cache's."""
        self._cancel()

    def _cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def prompt(self) -> array[int]:
        """The tokens of all that was written: the prompt of what comes next."""
        text = compose(self._items, self._engine.template)
        starts_with_turn = bool(self._items) and isinstance(self._items[0], Turn)
        self._stream = self._stream.reach(text, self._engine.encoder, bos=not starts_with_turn)
        return self._stream.tokens

    def choices(self, select: Select, prompt: array[int]) -> tuple[list[str], int, list[array[int]]]:
        """The escaped texts of the choices, how many tokens at the end of the prompt are decided anew with them, and
        their tokens, those included.

        Raises:
            RequestError: the vocabulary has no tokens for one of them.
        """
        texts = [self._following(choice, plain=True) for choice in select.choices]
        healed, tokens = self._continuations(prompt, texts, self.plain_bytes() if select.heal else 0)
        for choice, encoded in zip(select.choices, tokens, strict=True):
            if not encoded:
                raise runtime.RequestError(f"the model's vocabulary cannot spell the choice {choice!r}.")
        return texts, healed, tokens

    def go_on(self, tokens: Iterable[int], text: str, *, healed: int = 0) -> None:
        """Go on behind what was generated or chosen: its tokens, which stand for the last `healed` as well, and its
        escaped text."""
        self._stream = self._stream.add(tokens, text, healed=healed)
        self._write(text, plain=True)

    def plain_bytes(self) -> int:
        """How many bytes at the end of the prompt are text of the program's: after its turn's beginning, and after what
        was generated."""
        written = self._written()
        end = min(self._stream.constant, len(written))
        if not self._stream.text.endswith(written[len(written) - end :]):
            return 0  # the template changed it
        return len(unescape(written[len(written) - end :]).encode()) if end else 0

    def _origins(self, prompt: array[int], result: runtime.Result) -> Origins:
        computed = prompt[result.hit_tokens :]
        return Origins(
            computed, result.tokens, frozenset(result.forced_at), self._engine.tokenizer.spelled, result.healed_bytes
        )

    def _completed(self, prompt: array[int], results: list[runtime.Result | Exception]) -> Completion:
        """Go on with the first sample; raise the first failure."""
        samples = []
        for result in results:
            if isinstance(result, Exception):
                raise result
            spelled = completion(result, lambda token: self._engine.tokenizer.decode([token]))
            samples.append(replace(spelled, origins=self._origins(prompt, result)))
        first = results[0]
        assert isinstance(first, runtime.Result)
        kept = self._following(first.text.removesuffix(first.tail) if first.tail else first.text, plain=True)
        self.go_on(first.tokens[: first.kept], kept, healed=first.healed)
        self._write(self._following(first.tail, plain=True), plain=True)
        return replace(samples[0], samples=tuple(samples)) if len(samples) > 1 else samples[0]

    def _continuations(
        self, prompt: array[int], texts: list[str], plain_bytes: int
    ) -> tuple[int, list[array[int]]]:
        """How many tokens at the end of the prompt are decided anew with the choices, and the tokens of each choice,
        those included: as many as could be the beginning of a longer token, if they are that for one of the choices."""
        encoder = self._engine.encoder
        end = self._engine.seam(prompt, plain_bytes)
        before = self._engine.tokenizer.decode(end)
        if end and encoder.encode(encoder.escape(before), at_start=False, bos=False) != list(end):
            end, before = array("i"), ""  # they are not what their text becomes alone
        joined = [encoder.encode(encoder.escape(before) + text, at_start=False, bos=False) for text in texts]
        if all(tokens[: len(end)] == list(end) for tokens in joined):
            return 0, [array("i", tokens[len(end) :]) for tokens in joined]
        return len(end), [array("i", tokens) for tokens in joined]

    def _selected(
        self,
        select: Select,
        texts: list[str],
        tokens: list[array[int]],
        healed: int,
        found: list[list[list[float]] | Exception],
    ) -> Selection:
        """Go on with the winner; raise the first failure."""
        scores: list[list[list[float]]] = []
        for one in found:
            if isinstance(one, Exception):
                raise one
            scores.append(one)
        index, totals = decide(select.method, *scores)
        self.go_on(tokens[index], texts[index], healed=healed)
        return Selection(select.choices[index], index, totals)

    def _following(self, text: str, *, plain: bool) -> str:
        """`text` escaped to stand after what is written: a control token lies whole in text that is not plain."""
        escaped = self._engine.encoder.escape(text) if plain else protect(text)
        return self._engine.encoder.follow(self._written(), escaped) if plain or self._plain else escaped

    def _written(self) -> str:
        """The escaped text of the open turn, or since the last turn."""
        match self._last():
            case Turn(_, content, True):
                return content
            case Loose(text):
                return text
            case _:
                return ""

    def _write(self, text: str, *, plain: bool) -> None:
        """Add escaped text to the open turn, or outside of the turns."""
        if text:
            self._plain = plain
        last = self._last()
        if isinstance(last, Turn) and last.open:
            self._items = (*self._items[:-1], replace(last, content=last.content + text))
        elif isinstance(last, Loose):
            self._items = (*self._items[:-1], Loose(last.text + text))
        else:
            self._items = (*self._items, Loose(text))

    def _last(self) -> Item | None:
        return self._items[-1] if self._items else None


def _arguments_read(fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of calls as objects: what JSON spells with backslashes is seen by who looks for control tokens."""
    if "tool_calls" in fields:
        fields["tool_calls"] = tools.with_arguments(fields["tool_calls"], as_text=False)
    return fields


RUNTIME_OPTIONS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "seed", "return_logprob", "top_logprobs", "stop", "stop_regex",
    "stop_token_ids", "ignore_eos", "heal", "choices", "grammar", "on_truncate",
)  # fmt: skip


def generate_params(gen: Gen) -> runtime.GenerateParams:
    """What the runtime is asked for a `Gen` whose options are filled."""
    options = gen.options
    given = {
        name: value
        for name in RUNTIME_OPTIONS
        if (value := getattr(options, name)) is not None
    }
    given["logprob_start"] = options.logprob_start_len
    if options.regex is not None:
        given["regex"] = normalize(options.regex)
    if options.json_schema is not None:
        given["json_schema"] = options.json_schema.text
    return runtime.GenerateParams(**given)


def completion(result: runtime.Result, spell: Callable[[int], str]) -> Completion:
    """One sample, in the words of the interpreter.

    Args:
        spell: the text of a token.
    """

    def told(logprobs: tuple[runtime.Logprob, ...] | None) -> tuple[TokenLogprob, ...] | None:
        if logprobs is None:
            return None
        return tuple(
            TokenLogprob(one.token, spell(one.token), one.logprob, tuple((spell(t), p) for t, p in one.top))
            for one in logprobs
        )

    usage = Usage(result.prompt_tokens, result.hit_tokens, len(result.tokens), result.forced_tokens)
    times = Times(result.times.waiting_s, result.times.first_token_s, result.times.total_s)
    return Completion(
        result.text,
        result.finish_reason,
        usage,
        complete=result.complete,
        exact=result.exact,
        warnings=result.warnings,
        violation=result.violation,
        detail=result.detail,
        times=times,
        tokens=result.tokens,
        logprobs=told(result.logprobs),
        prompt_logprobs=told(result.prompt_logprobs),
    )


def guarded(listener: Listener[Any], report: Callable[[], None]) -> None:
    """Run `report`; what it raises is the listener's failure."""
    try:
        report()
    except Exception as error:
        listener.on_failed(error)
