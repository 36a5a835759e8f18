"""The engine's thread: take messages, run a step, hand out what it gave; and again.

Only this thread touches the tree, the slots and the scheduler. What it has to say goes to a second
thread, which calls the requests' callbacks, so that no callback ever holds up a step.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .devices import is_cpu, on
from .draws import Draw, Drawer
from .errors import EngineClosed, EngineError, as_error
from .gil import SHORT_TURNS
from .kv import KVPool
from .poison import NoNumbers, forget_poison, rows_without_numbers
from .request import Delta, FinishReason, Logprob, Request
from .runner import Runner
from .scheduler import Plan, Scheduler, StuckRequest
from .stats import Stats

log = logging.getLogger("branchwise")

CLOSE_WITHIN = 128
"""With so many tokens left, a request that shall not be cut off looks whether its constraint can still be fulfilled."""

MOST_FAILURES = 2
"""A request that was alone in this many failed steps fails."""


MOST_UNPLANNED = 100
"""After so many failures in a row to plan a step, whoever was to take part, the loop ends."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Requests that arrive together."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Run a query on the engine's thread, between two steps."""

    query: Callable[[Scheduler], Any]
    answer: Future[Any]


@dataclass(frozen=True, slots=True)
class Close:
    pass


Message: TypeAlias = Submit | Cancel | Ask | Close


class StepLoop:
    """Every request that is submitted ends in exactly one call of its `on_done`, also when the loop fails or closes."""

    def __init__(
        self,
        runner: Runner,
        drawer: Drawer,
        pool: KVPool,
        scheduler: Scheduler,
        eos_ids: frozenset[int],
        context_length: int,
        *,
        jump_forward: bool = True,
    ) -> None:
        self._runner, self._drawer, self._pool = runner, drawer, pool
        self._scheduler = scheduler
        self._eos_ids = eos_ids
        self._context_length = context_length
        self._jumps = jump_forward
        self._counts: Counter[str] = Counter()  # by the names of `Stats`
        self._step_s = self._first_step_s = 0.0
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[Callable[[Any], None], Any] | None] = queue.SimpleQueue()
        self._unplanned = 0  # times in a row that no step could be planned
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self.watchers: list[Callable[[Scheduler], None]] = []  # called after each step; the engine's thread only
        self._gate = threading.Lock()  # between a message that is posted and the loop that ends
        self._ended: Exception | None = None
        self._silent = False           # the completion thread hears nothing more
        self._threads = [
            threading.Thread(target=self._run, name="branchwise-engine", daemon=True),
            threading.Thread(target=self._deliver, name="branchwise-completions", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def post(self, message: Message) -> None:
        """Leave a message for the engine's thread. Any thread.

        Raises:
            EngineClosed: the loop has ended.
        """
        with self._gate:
            if self._ended is not None:
                raise EngineClosed(*self._ended.args) from self._ended.__cause__
            self._inbox.put(message)

    def tell(self, callback: Callable[[Any], None], value: object) -> None:
        """Call `callback(value)` on the completion thread, after what is queued there; at once if that has ended."""
        with self._gate:
            if not self._silent:
                self._events.put((callback, value))
                return
        callback(value)

    def close(self) -> None:
        """End the loop; requests that are not finished fail with `EngineClosed`.

        Waits until it has ended, unless one of its own threads calls.
        """
        with self._gate:
            if self._ended is None:
                self._inbox.put(Close())
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        end = EngineClosed("the engine was closed.")
        try:
            with on(self._runner.device):
                while self._take_messages():
                    with SHORT_TURNS:
                        self._step()
                    for watch in list(self.watchers):
                        self._show(watch)
        except BaseException as error:  # whatever it is: those who wait must hear of it
            log.exception("the engine's step loop failed")
            end = EngineClosed(f"the engine has ended: its step loop failed: {error!r}")
            end.__cause__ = error
        with self._gate:
            self._ended = end
        self._fail_all(end)
        with self._gate:
            self._silent = True
            self._events.put(None)

    def _show(self, watch: Callable[[Scheduler], None]) -> None:
        try:
            watch(self._scheduler)
        except Exception:
            log.exception("what watched the steps failed, and sees no more of them")
            self.watchers.remove(watch)

    def _deliver(self) -> None:
        while (event := self._events.get()) is not None:
            _call(*event)
            del event  # it would keep an engine alive that nobody else holds until the next one comes

    def _fail_all(self, error: Exception) -> None:
        requests = [*self._scheduler.running, *self._scheduler.waiting]
        while not self._inbox.empty():
            match self._inbox.get():
                case Submit(more):
                    requests += more
                case Ask(_, answer):
                    answer.set_exception(error)
                case Cancel() | Close():
                    pass
        for request in requests:
            self.tell(request.on_done, error)

    def _submit(self, requests: tuple[Request, ...]) -> None:
        now = time.monotonic()
        for request in requests:
            request.arrived = now
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, request.id, request))
        self._counts["requests"] += len(requests)
        for request in requests:
            try:
                self._jump_forward(request)
                if not request.finished:
                    self._scheduler.add([request])
            except BaseException as error:  # a constraint's compiled code may panic
                self._fail(request, as_error(error))

    def _end_late_requests(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            request = heapq.heappop(self._deadlines)[-1]
            if not request.finished:
                self._end(request, "cancelled", "timeout")

    def _take_messages(self) -> bool:
        """Act on all messages; waits for one if there is nothing else to do. False: close."""
        self._end_late_requests()
        while True:
            try:
                message = self._inbox.get_nowait() if self._scheduler.busy else self._inbox.get()
            except queue.Empty:
                return True
            if isinstance(message, Close):
                return False
            self._act(message)
            del message  # as in `_deliver`

    def _act(self, message: Submit | Cancel | Ask) -> None:
        match message:
            case Submit(requests):
                self._submit(requests)
            case Cancel(requests):
                self._cancel(requests)
            case Ask(query, answer):
                _answer(query, answer, self._scheduler)

    def stats(self) -> Stats:
        """A snapshot. On the engine's thread only."""
        tree, tiers = self._scheduler.tree, self._scheduler.tiers
        return Stats(
            **self._counts,
            num_slots=tree.pool.num_slots,
            step_s=self._step_s,
            first_step_s=self._first_step_s,
            spilled_tokens=tiers.spilled_tokens if tiers else 0,
            restored_tokens=tiers.restored_tokens if tiers else 0,
            retracted=self._scheduler.num_retracted,
            evicted_slots=tree.evicted,
            free_slots=tree.pool.num_free,
            evictable_slots=tree.evictable,
            pinned_slots=tree.pinned,
            protected_slots=tree.protected,
            held_slots=tree.held,
            waiting=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
        )

    def _cancel(self, requests: tuple[Request, ...]) -> None:
        for request in requests:
            if not request.finished:
                self._end(request, "cancelled", "cancelled")

    def _step(self) -> None:
        start, began = time.perf_counter(), time.monotonic()
        try:
            plan = self._scheduler.plan()
        except StuckRequest as stuck:
            self._end(stuck.request, "length", "slots")
            return
        except Exception as error:
            log.exception("a step could not be planned")
            self._unplanned += 1
            suspects = self._scheduler.give_up()
            if not suspects or self._unplanned > MOST_UNPLANNED:
                raise
            self._blame(suspects, error, "step could not be planned")
            return
        self._unplanned = 0
        if plan is None:
            return
        try:
            logits = self._runner.forward(plan.layout)
            spoilt = rows_without_numbers(logits) if is_cpu(self._runner.device) else []  # it would wait for a GPU
        except Exception as error:
            self._undo(plan, plan.placed, error)
            return
        if spoilt:
            guilty = [r for r, places in plan.wanted if any(plan.layout.logit_of[i] in spoilt for i in places)]
            self._undo(plan, guilty, NoNumbers())
            forget_poison(guilty, self._scheduler, self._pool)
            return
        self._scheduler.tree.commit()
        written = plan.layout.num_written
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += written
        self._counts["repeated_rows"] += len(plan.layout.tokens) - written
        wanted = [(request, [plan.layout.logit_of[i] for i in places]) for request, places in plan.wanted]
        drawn = self._draw(logits, wanted)
        for request, rows in wanted:
            self._count_admission(request, began)
            if rows:
                self._use(request, logits, rows, drawn.get(request))
        self._step_s += time.perf_counter() - start

    def _undo(self, plan: Plan, suspects: Sequence[Request], error: Exception) -> None:
        """Take the failed step back. Each of the suspects tries again alone, so that only who is at fault fails."""
        log.warning("a step of %d rows failed: %r", len(plan.layout.tokens), error)
        self._scheduler.undo(plan)
        self._blame(suspects if len(plan.placed) > 1 else plan.placed, error, "forward pass failed", len(plan.placed))

    def _blame(self, suspects: Sequence[Request], error: Exception, what: str, placed: int = 1) -> None:
        """Have each suspect try again alone. Who was alone already, of `placed` in the step, fails the second time."""
        if max(placed, len(suspects)) > 1:
            self._scheduler.suspects.extend(suspects)
            return
        request = suspects[0]
        request.failures += 1
        if request.failures < MOST_FAILURES:
            self._scheduler.suspects.appendleft(request)
            return
        said = str(error) if isinstance(error, EngineError) else repr(error)
        failure = EngineError(f"request {request.id}: its {what} {request.failures} times: {said}")
        failure.__cause__ = error
        self._fail(request, failure)

    def _count_admission(self, request: Request, began: float) -> None:
        if request.started is None:
            request.started = began
        if not request.counted and request.hit_len is not None:
            request.counted = True
            self._counts["prompt_tokens"] += request.prompt_len
            self._counts["hit_tokens"] += request.hit_len
            self._counts["best_hit_tokens"] += request.best_hit or 0
            self._first_step_s += time.monotonic() - request.arrived

    def _draw(self, logits: Tensor, wanted: Sequence[tuple[Request, list[int]]]) -> dict[Request, int | Exception]:
        """The first token that each request samples in this step, all drawn together."""
        draws = [
            Draw(request, rows[known])
            for request, rows in wanted
            if len(rows) > (known := _num_known(request, rows)) and not request.forced
        ]
        try:
            tokens = self._drawer.draw(logits, draws)
        except Exception:
            log.exception("drawing for %d requests failed; each is tried alone", len(draws))
            tokens = [self._draw_alone(logits, draw) for draw in draws]
        return dict(zip([draw.request for draw in draws], tokens, strict=True))

    def _draw_alone(self, logits: Tensor, draw: Draw) -> int | Exception:
        try:
            return self._drawer.draw(logits, [draw])[0]
        except Exception as error:
            return error

    def _use(self, request: Request, logits: Tensor, rows: list[int], drawn: int | Exception | None) -> None:
        """Do with the logits at a request's places what it wants them for. A failure is that request's alone."""
        try:
            known = _num_known(request, rows)
            if known:
                first = request.first_wanted + 1
                self._record(request, logits[rows[:known]], request.tokens[first : first + known])
            if request.scoring:
                if request.first_wanted == request.end:
                    self._end_request(request)
                    self.tell(request.on_done, [found.logprob for found in request.logprobs])
            elif rows[known:]:
                self._sample_along_draft(request, logits, rows[known:], drawn)
        except BaseException as error:  # a constraint's compiled code may panic
            self._fail(request, as_error(error))

    def _sample_along_draft(
        self, request: Request, logits: Tensor, rows: list[int], drawn: int | Exception | None
    ) -> None:
        """Take the token after a request's own, and go on while what is sampled is what was drafted."""
        for place, row in enumerate(rows):
            if request.forced:
                token = self._forced(request)
            else:
                sampled = drawn if drawn is not None else self._drawer.draw(logits, [Draw(request, row)])[0]
                drawn = None
                if isinstance(sampled, Exception):
                    raise sampled
                token = self._or_close(request, sampled)
            guessed = place < request.drafted and token == request.draft[place]
            request.accepted += guessed
            if request.logprobs_from is not None:
                self._record(request, logits[row : row + 1], [token])
            if request.held is None or not request.heal(token):
                self._generated(request, token)
            if request.finished:
                return
            if not guessed:
                break
        request.settle(self._scheduler.tree)
        self._jump_forward(request)

    def _record(self, request: Request, logits: Tensor, tokens: Sequence[int]) -> None:
        """Keep the log-probabilities of `tokens`, each after its row of `logits` [T, V]."""
        logprobs = logits.log_softmax(-1)
        values: list[float] = logprobs.gather(1, torch.tensor([*tokens], device=logits.device)[:, None])[:, 0].tolist()
        likeliest = logprobs.topk(min(request.top_logprobs, logprobs.shape[1]))
        others: list[list[int]] = likeliest.indices.tolist()
        theirs: list[list[float]] = likeliest.values.tolist()
        for token, value, ids, scores in zip(tokens, values, others, theirs, strict=True):
            request.logprobs.append(Logprob(token, value, tuple(zip(ids, scores, strict=True))))

    def _jump_forward(self, request: Request) -> None:
        """Take what must come next without a pass for each token; what is likely then is drafted."""
        request.look_ahead()
        if not self._jumps:
            return
        if request.logprobs_from is not None:  # then a row of logits is wanted for what is forced, too
            request.draft = array("i", [*request.forced, *request.likely])
            return
        while request.forced and not request.finished:
            self._generated(request, self._forced(request))
        if request.likely:
            request.draft, request.likely = array("i", request.likely), ()

    def _or_close(self, request: Request, token: int) -> int:
        """`token`, or the first one on the way to the end of the constraint if after `token` there were no room for it.

        The rest of the way is then forced.
        """
        state = request.constraint
        room = min(request.max_tokens - request.num_sampled, self._context_length - len(request.tokens))
        if not request.closes or state is None or request.held is not None or room > CLOSE_WITHIN:
            return token
        after = state.fork()
        if token in self._eos_ids or (after.advance(token) and after.closing(room - 1) is not None):
            return token
        way = state.closing(room)
        if not way:
            return token
        request.forced.extend(way[1:])
        return way[0]

    def _forced(self, request: Request) -> int:
        request.forced_at.append(request.num_sampled)
        self._counts["forced_tokens"] += 1
        return request.forced.popleft()

    def _generated(self, request: Request, token: int) -> None:
        """A token follows, sampled or forced: its text, and whether it is the last one."""
        self._counts["generated_tokens"] += 1
        if request.first_token is None:
            request.first_token = time.monotonic()
        if token in self._eos_ids and not (request.ignore_eos and request.constraint is None):
            self._finish(request, "stop", "eos")
            return
        if token in request.stop_ids:
            self._finish(request, "stop", f"token {token}")
            return
        request.tokens.append(token)
        text = request.take(token)
        if request.stops.matched is not None:
            self._finish(request, "stop", repr(request.stops.matched), text)
        elif request.constraint is not None and request.constraint.is_finished:
            self._finish(request, "stop", "constraint", text)
        elif request.num_sampled >= request.max_tokens:
            self._finish(request, "length", "max_tokens", text)
        elif len(request.tokens) >= self._context_length:
            self._finish(request, "length", "context", text)
        else:
            request.look_ahead()
            if text and request.on_delta is not None:
                self.tell(request.on_delta, Delta(text))

    def _finish(self, request: Request, reason: FinishReason, detail: str, text: str = "") -> None:
        """End a request, with what it generated so far."""
        self._end_request(request)
        if request.scoring:
            error = EngineError(f"request {request.id} ended before its text was scored: {detail}")
            self.tell(request.on_done, error)
            return
        text += request.take_rest()
        if request.stops.matched is not None:
            reason, detail = "stop", repr(request.stops.matched)
        if text and request.on_delta is not None:
            self.tell(request.on_delta, Delta(text))
        self.tell(request.on_done, request.result(reason, detail))

    def _end(self, request: Request, reason: FinishReason, detail: str) -> None:
        """`_finish`, from outside of what the request wanted of its step."""
        try:
            self._finish(request, reason, detail)
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        self._end_request(request)
        self.tell(request.on_done, error)

    def _end_request(self, request: Request) -> None:
        request.finished = True
        if request.keep_pinned and request.num_sampled and request.node is not None:
            tree = self._scheduler.tree
            found = tree.match(request.tokens[: request.num_prompt], tree.root(request.namespace))
            request.pinned = tree.pin(found)
        self._scheduler.remove(request)


def _num_known(request: Request, rows: Sequence[int]) -> int:
    """How many of the rows that a request wants come before a token that it has already."""
    return min(len(rows), len(request.tokens) - 1 - request.first_wanted)


def _call(callback: Callable[[Any], None], value: object) -> None:
    try:
        callback(value)
    except BaseException:  # also an exit: others wait for this thread
        log.exception("a callback of a request failed")


def _answer(query: Callable[[Scheduler], Any], answer: Future[Any], scheduler: Scheduler) -> None:
    try:
        answer.set_result(query(scheduler))
    except BaseException as error:
        answer.set_exception(error)
