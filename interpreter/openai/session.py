"""One conversation with a server: what was said is kept here and sent again with every call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from branchwise.lang import Gen, Select, Text
from branchwise.lang.choices import decide

from ..errors import Cancelled
from ..session import Cancel, Completion, Listener, Segment, Selection
from .asking import Prompt, check, choice_in, constrained_choice, generation, scored_choices
from .client import Request
from .errors import ServerError, Unsupported
from .reply import Reply, usage_of
from .scoring import rows_of
from .speculation import Ahead, how, token_offsets, worth

if TYPE_CHECKING:
    from .backend import OpenAI


class RemoteSession:
    """What was said, as a prompt. `ahead` is what the model is known to write next; the prompt does not have it."""

    def __init__(self, backend: OpenAI, prompt: Prompt) -> None:
        self._backend = backend
        self._prompt = prompt
        self._ahead: Ahead | None = None
        self._cancel: Cancel | None = None  # of the last operation

    def append(self, segment: Segment) -> None:
        if self._ahead is not None:
            left = self._ahead.past(segment.text) if isinstance(segment, Text) else None
            if left is None:
                self._drop_ahead()
            self._ahead = left
        self._prompt = self._prompt.then(segment)

    def prepare(self, gen: Gen) -> None:
        """Refuse a call that the server cannot answer, where it is written.

        Raises:
            Unsupported: with the call and the option.
        """
        check(gen, self._backend.dialect, chat=None)

    def request(self, call: Gen | Select) -> Request:
        """What `call` asks of the server here.

        Raises:
            Unsupported: it cannot be asked.
        """
        dialect = self._backend.dialect
        if isinstance(call, Gen):
            return generation(self._prompt, call, dialect)
        if not self._scored:
            return constrained_choice(self._prompt, call, dialect)
        if call.method == "unconditional_likelihood_normalized":
            raise Unsupported(
                f"{call.call}: {call.method} needs the log-probability of a text's first token, which servers do not "
                "send. Choose another choices_method."
            )
        return scored_choices(self._prompt, call, dialect)

    @property
    def _scored(self) -> bool:
        """Whether choices are scored; else the server is held to them."""
        return self._backend.scores_choices and not self._prompt.chat

    def generate(self, gen: Gen, listener: Listener[Completion]) -> Cancel:
        request = self.request(gen)
        if (known := self._take_ahead(gen)) is not None:
            self._backend.stats.add(speculated=1)
            listener.on_done(known)
            return _nothing
        written_on = self._backend.speculative_tokens

        def on_cancelled() -> None:
            listener.on_done(Completion("", "cancelled", detail="cancelled"))

        if written_on and not self._prompt.chat and worth(gen.options):
            return self._start(lambda: self._write_on(request, gen, listener, written_on), listener, on_cancelled)
        return self._start(lambda: self._generate(request, gen, listener), listener, on_cancelled)

    def select(self, select: Select, listener: Listener[Selection]) -> Cancel:
        self._drop_ahead()
        request = self.request(select)
        answer = self._select_by_scores if self._scored else self._select_by_constraint

        def on_cancelled() -> None:
            listener.on_failed(Cancelled(f"{select.call} was cancelled"))

        return self._start(lambda: answer(request, select, listener), listener, on_cancelled)

    def fork(self, count: int) -> list[RemoteSession]:
        """What the model wrote on stays here: branches with the same text would not be drawn apart from each other."""
        return [RemoteSession(self._backend, self._prompt) for _ in range(count)]

    def close(self) -> None:
        if self._cancel is not None:
            self._cancel()

    # On the backend's loop

    async def _generate(self, request: Request, gen: Gen, listener: Listener[Completion]) -> None:
        reply = Reply(gen.options.n or 1, listener.on_delta)
        await self._ask(request, reply)
        listener.on_done(self._completion(reply, gen))

    async def _write_on(self, request: Request, gen: Gen, listener: Listener[Completion], least: int) -> None:
        """Ask for more than the call may have, without its stops; what is over is kept for the next calls."""
        limit = max(least, gen.options.max_tokens or 0)
        arguments = {name: value for name, value in request.arguments.items() if name != "stop"}
        reply = Reply(1, None)
        longer = replace(request, arguments={**arguments, "max_tokens": limit, "logprobs": 1})
        await self._ask(longer, reply)
        sample = reply.samples[0]
        offsets = token_offsets(sample.text, [token.text for token in sample.logprobs])
        found = None
        if offsets is not None:
            self._ahead = Ahead(sample.text, sample.finish == "stop", how(gen.options), offsets)
            found = self._take_ahead(gen)
        if found is None:  # no end in sight, or not known how many tokens the text has
            await self._generate(request, gen, listener)
        else:
            listener.on_done(replace(found, usage=reply.usage))

    async def _select_by_scores(self, request: Request, select: Select, listener: Listener[Selection]) -> None:
        prompt, answers = self._prompt.text, list[Any]()

        def take(answer: Any) -> bool:
            answers.append(answer)
            return False

        await self._backend.client.ask(request, take)
        index, scores = decide(select.method, rows_of(answers[0], prompt, select.choices))
        self._prompt = self._prompt.said(select.choices[index])
        used = usage_of(answers[0].usage)
        self._backend.stats.count(used)
        listener.on_done(Selection(select.choices[index], index, scores, used))

    async def _select_by_constraint(self, request: Request, select: Select, listener: Listener[Selection]) -> None:
        reply = Reply(1, None)
        await self._ask(request, reply)
        choice = choice_in(reply.samples[0].text, select.choices)
        if choice is None:
            raise ServerError(f"the server was held to the choices, and wrote {reply.samples[0].text[:200]!r}")
        self._prompt = self._prompt.said(choice)
        scores = tuple(0.0 if other == choice else -1.0 for other in select.choices)
        how_chosen = () if select.method == "greedy_token_selection" else (
            f"The server does not score choices here: it was held to them and wrote the likeliest, token by token, "
            f"not by {select.method}; the scores say which it was and no more.",
        )  # fmt: skip
        listener.on_done(Selection(choice, select.choices.index(choice), scores, reply.usage, how_chosen))

    async def _ask(self, request: Request, reply: Reply) -> None:
        await self._backend.client.ask(request, reply.take, begin=reply.begin, check=reply.check)
        self._backend.stats.count(reply.usage)

    def _completion(self, reply: Reply, gen: Gen) -> Completion:
        options = gen.options
        completion = reply.completion(
            constrained=options.constrained,
            stops=options.stop or (),
            want_logprobs=bool(options.return_logprob),
        )
        self._prompt = self._prompt.said(completion.text)
        return completion

    def _take_ahead(self, gen: Gen) -> Completion | None:
        """The answer to `gen`, if the model is known to write it; else what is known is of no use any more."""
        if self._ahead is None:
            return None
        found = self._ahead.answer(gen)
        if found is None:
            self._drop_ahead()
            return None
        text, detail = found
        self._ahead = self._ahead.cut(len(text))
        self._prompt = self._prompt.said(text)
        return Completion(text, "stop", detail=detail)

    def _drop_ahead(self) -> None:
        if self._ahead is not None and self._ahead.text:
            self._backend.stats.add(missed=1)
        self._ahead = None

    def _start(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        listener: Listener[Any],
        on_cancelled: Callable[[], None],
    ) -> Cancel:
        async def guarded() -> None:
            try:
                await work()
            except Exception as error:
                listener.on_failed(error)

        self._cancel = self._backend.loop.start(guarded(), on_cancelled)
        return self._cancel


def _nothing() -> None:
    """There is nothing to cancel."""
