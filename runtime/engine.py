"""The face of the runtime: a model, its cache, and a thread that computes.

    engine = Engine("smollm2-135m")
    print(engine.generate("The capital of France is", max_tokens=8).text)

Prompts and results are tokens or text; requests that share a prefix share its keys and values, on
their own. Nothing here knows a program: see `branchwise.function` for that.
"""

from __future__ import annotations

import logging
import operator
import os
import random
import re
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, overload

import torch

from . import saved
from .config import EngineConfig, auto_num_slots, check_memory, engine_config, no_memory
from .constrain import Compiler, Constraint
from .constrain.forced import forced_text
from .constrain.vocab import Vocab
from .devices import gib, is_cpu, on
from .drawers import drawer_for
from .drawing import as_dot
from .errors import EngineClosed, OutOfSlots, RequestError, RequestTooLong
from .film import Film
from .handles import Gather, Handle, LatePin, Pin, for_sample, settle, wait_for
from .healing import Healer
from .kv import KVPool, bytes_per_slot
from .loop import Ask, StepLoop
from .model.load import load_model
from .models import resolve
from .params import GenerateParams, generate_params
from .penalties import Repeated
from .picture import TreePicture, picture
from .policies import EVICTION
from .ranks.parallel import Team
from .request import Delta, Request, Result
from .running import runner_for
from .sampling import SamplingParams
from .scheduler import Scheduler
from .slots import SlotPool
from .stats import Stats
from .stops import StopMatcher
from .tiers import open_tiers
from .tokenizer import Tokenizer
from .tree import RadixTree

log = logging.getLogger("branchwise")

T = TypeVar("T")


class Engine:
    """A model that computes every prefix once. Any thread may use it; close it, or let it go, when done."""

    def __init__(self, model: str | Path = "smollm2-135m", **options: Any) -> None:
        """Load a model and start.

        Args:
            model: a known name (`branchwise models` lists them), a folder, or "org/name" on the Hugging Face hub.
            options: see `EngineConfig`.

        Raises:
            ModelNotFound, WeightsError: there is no such model, or it cannot be run; nothing was started.
            RequestError: an option has a value it cannot have.
        """
        self.config: EngineConfig = engine_config(**options)
        device = self.config.torch_device()
        folder = resolve(model)
        self.name: str = str(model)
        self.tokenizer: Tokenizer = Tokenizer(folder)
        dtype = self.config.torch_dtype(device)
        self.config.check_deterministic(device, dtype)
        threads = self.config.num_threads(device)
        if threads is not None:
            torch.set_num_threads(threads)  # before there is a thread that computes
        self.num_threads: int = torch.get_num_threads()
        team: Team | None = None
        if self.config.tensor_parallel > 1:
            team = Team(self.config.tensor_parallel, folder, dtype, device, self.num_threads)
            device = team.devices[0]
        self._closing = closing = ExitStack()
        if team is not None:
            closing.callback(team.close)
        try:
            with on(device):
                self._start(folder, dtype, device, team)
        except BaseException:
            closing.close()
            raise
        self._finalizer = weakref.finalize(self, closing.close)

    def _start(self, folder: Path, dtype: torch.dtype, device: torch.device, team: Team | None) -> None:
        """Load the model and begin; `_closing` has what must end."""
        quantization, split = self.config.quantization, team.links.split() if team else None
        deterministic = self.config.deterministic
        with no_memory(device, "the weights", f"a smaller model, or dtype (now {dtype})"):
            net = load_model(
                folder, dtype=dtype, device=device, quantization=quantization, split=split, deterministic=deterministic
            )
        self.model = net
        self.context_length = self.config.context_length or net.context_length
        if self.context_length > net.context_length:
            raise RequestError(
                f"Engine: context_length {self.context_length} is more than the {net.context_length} positions that "
                "this model was made for."
            )
        wanted = self.config.num_slots
        slot_bytes = bytes_per_slot(net.specs, net.dtype)
        page_size, eviction = self.config.page_size, self.config.eviction
        if wanted == "auto":
            wanted = auto_num_slots(slot_bytes, self.context_length, device) // page_size * page_size
        self.num_slots = wanted
        check_memory(wanted, slot_bytes, device)
        size = f"keys and values of {wanted:,} slots, {gib(wanted * slot_bytes)}"
        with no_memory(device, size, f"num_slots (now {wanted:,})"):
            self._pool = pool = KVPool(self.num_slots, net.specs, net.dtype, device, page_size)
        self._cached_for = saved.fingerprint(
            saved.weights_fingerprint(folder) + (f" as {quantization}" if quantization else ""),
            self.tokenizer.fingerprint,
            net.specs,
            net.dtype,
            page_size,
            deterministic=deterministic,
        )
        self._tiers = open_tiers(self.config, pool)
        closing = self._closing
        if self._tiers is not None:
            closing.callback(self._tiers.close)
        vocab = Vocab(
            self.tokenizer.token_bytes,
            self.tokenizer.special_ids,
            self.tokenizer.eos_ids,
            size=net.vocab_size,
            encode=partial(self.tokenizer.encode, at_start=False, control=False),
        )
        self._compiler = Compiler(vocab)
        self._healer = Healer(vocab)
        self._seeds = random.Random(self.config.seed)
        self._pid = os.getpid()
        tree = RadixTree(
            SlotPool(self.num_slots, page_size), EVICTION[eviction] if isinstance(eviction, str) else eviction
        )
        tree.on_evict = self._tiers.spill if self._tiers else None
        scheduler = Scheduler(
            tree,
            max_step_tokens=self.config.max_step_tokens,
            max_running=self.config.max_running,
            policy=self.config.policy,
            tiers=self._tiers,
        )
        runner = runner_for(
            net, pool, cuda_graphs=self.config.cuda_graphs, deterministic=self.config.deterministic, team=team
        )
        self.attention_name: str = runner.attention_name
        self._loop = StepLoop(
            runner,
            drawer_for(device, self.tokenizer.eos_ids),
            pool,
            scheduler,
            self.tokenizer.eos_ids,
            self.context_length,
            jump_forward=self.config.jump_forward,
        )
        closing.callback(self._loop.close)
        closing.callback(self._compiler.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model, packed = self.model, f", {self.config.quantization}" if self.config.quantization else ""
        threads = f", {self.num_threads} threads" if is_cpu(model.device) else ""
        return f"Engine({self.name!r}, {model.dtype}{packed}, {model.device}{threads}, {self.num_slots} slots)"

    def close(self) -> None:
        """End the engine's threads; what is not finished fails with `EngineClosed`. Twice is fine."""
        self._finalizer()

    @overload
    def generate(self, prompt: str | Sequence[int], *, n: None = None, **params: Any) -> Result: ...
    @overload
    def generate(self, prompt: str | Sequence[int], *, n: int, **params: Any) -> list[Result]: ...

    def generate(self, prompt: str | Sequence[int], *, n: int | None = None, **params: Any) -> Result | list[Result]:
        """Continue a prompt and wait for the result.

        Args:
            prompt: text (the spelling of a control token in it is that token), or token ids, taken as they are.
            n: take so many samples, and return a list of them.
            params: see `GenerateParams`.

        Raises:
            RequestError: an argument has a value it cannot have.
            RequestTooLong: the prompt fits neither the model's context nor the pool.
            ConstraintError: the regex cannot be compiled.
        """
        if n is not None and n < 1:
            raise RequestError(f"generate: n must be at least 1, got {n!r}.")
        waits: list[Future[Result]] = [Future() for _ in range(n or 1)]
        handle = self.start(
            self.prompt_tokens(prompt),
            generate_params(**params),
            n=n or 1,
            on_done=lambda sample, result: settle(waits[sample], result),
        )
        results = wait_for(waits, handle)
        return results if n is not None else results[0]

    def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        cache_salt: str | None = None,
    ) -> list[list[float]]:
        """The log-probability of each token of each continuation, given the prompt and the tokens before it.

        All are computed together, and what they share is computed once.
        """
        if isinstance(continuations, str | bytes):
            raise RequestError("score: continuations must be a list of texts or of token ids, got one text.")
        if not continuations:
            return []
        wait: Future[list[list[float]]] = Future()
        encoded = [self.continuation_tokens(c) for c in continuations]
        handle = self.start_score(
            self.prompt_tokens(prompt),
            encoded,
            cache_salt=cache_salt,
            on_done=lambda scores: settle(wait, scores),
        )
        return wait_for([wait], handle)[0]

    def pin(self, prompt: str | Sequence[int], *, cache_salt: str | None = None) -> Pin:
        """Compute a prompt, unless it is cached, and keep it from eviction until the pin is released.

        With pages of several slots, its whole pages are kept.

        Raises:
            OutOfSlots: it fills the pool, so that nothing could be computed beside it.
        """
        tokens = self.prompt_tokens(prompt)
        if len(tokens) >= self.num_slots:
            size = self.num_slots
            raise OutOfSlots(wanted=len(tokens) + 1, free=size, total=size, who="pin()", prompt_alone=True)
        wait: Future[Result] = Future()
        handle = self.start(
            tokens,
            GenerateParams(max_tokens=1, temperature=0, cache_salt=cache_salt),
            pin=True,
            on_done=lambda _, result: settle(wait, result),
        )
        node = wait_for([wait], handle)[0].pinned
        assert node is not None, "the prompt was computed, but not pinned"
        return Pin(self._loop, node, len(tokens))

    def start_pin(self, tokens: array[int]) -> LatePin:
        """Likewise, at once: what comes back is released whether the prompt is computed by then or not."""
        late = LatePin(self._loop, len(tokens))
        params = GenerateParams(max_tokens=1, temperature=0)
        late.handle = self.start(tokens, params, pin=True, on_done=lambda _, result: late.arrive(result))
        return late

    def hold(self, prompt: str | Sequence[int], *, cache_salt: str | None = None) -> Pin:
        """`pin`, read as `with engine.hold(prompt): ...`."""
        return self.pin(prompt, cache_salt=cache_salt)

    def start(
        self,
        prompt: array[int],
        params: GenerateParams,
        *,
        n: int = 1,
        path: tuple[int, ...] = (),
        pin: bool = False,
        plain_bytes: int | None = None,
        on_delta: Callable[[int, Delta], None] | None = None,
        on_done: Callable[[int, Result | Exception], None],
    ) -> Handle:
        """Start `n` samples and return at once.

        Args:
            prompt: `array("i")` of token ids.
            path: where in a tree of forks this is; branches with equal seeds draw differently.
            pin: keep the prompt from eviction from then on; the result says where it ends.
            plain_bytes: how much of the prompt's end is constant text, so that `heal` may change its tokens; None: all.
            on_delta, on_done: called with the number of the sample, on the completion thread; `on_done` once a sample.
        """
        self.check_prompt(prompt)
        for token in (*params.stop_token_ids, *dict(params.logit_bias)):
            if token >= self.model.vocab_size:
                raise RequestError(f"the model's vocabulary has {self.model.vocab_size} tokens, and no {token}.")
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        handle = Handle(self._loop)

        def submit(constraint: Constraint | None) -> None:
            held = None
            if params.heal:
                state = constraint.start() if constraint else None
                held = self._healer.hold_back(prompt, sys.maxsize if plain_bytes is None else plain_bytes, state)
            kept = prompt[: len(prompt) - len(held.tokens)] if held else prompt
            logprobs_from = None
            if params.logprob_start is not None:
                logprobs_from = max(1, min(params.logprob_start, len(kept)))
            elif params.return_logprob or params.top_logprobs:
                logprobs_from = len(kept)
            handle.submit(
                tuple(
                    Request(
                        tokens=array("i", kept),
                        num_prompt=len(kept),
                        held=held,
                        draft=array("i", held.tokens if held else ()),
                        max_tokens=params.max_tokens,
                        sampling=SamplingParams(
                            temperature=params.temperature,
                            top_p=params.top_p,
                            top_k=params.top_k,
                            min_p=params.min_p,
                            seed=seed,
                            path=path,
                            sample=i,
                        ),
                        min_tokens=params.min_tokens,
                        repeated=Repeated(params.penalties) if params.penalties else None,
                        stop_ids=frozenset(params.stop_token_ids),
                        logprobs_from=logprobs_from,
                        top_logprobs=params.top_logprobs,
                        ignore_eos=params.ignore_eos,
                        namespace=params.cache_salt,
                        priority=params.priority,
                        routing_key=params.routing_key,
                        deadline=None if params.timeout_s is None else time.monotonic() + params.timeout_s,
                        keep_pinned=pin,
                        constraint=constraint.start() if constraint else None,
                        closes=params.on_truncate == "close",
                        detokenizer=self.tokenizer.detokenizer(),
                        stops=StopMatcher(params.stop, params.stop_regex),
                        on_delta=for_sample(on_delta, i) if on_delta else None,
                        on_done=judged(for_sample(on_done, i), constraint),
                    )
                    for i in range(n)
                )
            )

        def compiled(future: Future[Constraint]) -> None:
            try:
                submit(future.result())
            except Exception as error:
                for i in range(n):
                    self._loop.tell(for_sample(on_done, i), error)

        constraint = self.compile(params)
        if constraint is None:
            submit(None)
        else:
            constraint.add_done_callback(compiled)
        return handle

    def compile(self, params: GenerateParams) -> Future[Constraint] | None:
        """The constraint of such a generation, soon; None where there is none. Compiled once, and kept while there is
        room: asked for ahead of time, it is there when a generation needs it."""
        spec = params.constraint()
        return None if spec is None else self._compiler.compile(spec)

    def forced_text(self, params: GenerateParams) -> tuple[str, bool]:
        """What the constraint of such a generation begins with whatever the model says, and whether that is all of it.

        Waits until the constraint is compiled. Where there is none, nothing is forced.
        """
        constraint = self.compile(params)
        if constraint is None:
            return "", False
        said, whole = forced_text(constraint.result().start(), self._compiler.vocab)
        return said.decode(errors="ignore"), whole  # a character that is forced in part is not forced

    def start_score(
        self,
        prompt: array[int],
        continuations: Sequence[array[int]],
        *,
        cache_salt: str | None = None,
        on_done: Callable[[list[list[float]] | Exception], None],
    ) -> Handle:
        """Start scoring continuations, each of at least one token, and return at once; `on_done` is called once."""
        for tokens in continuations:
            assert tokens, "a continuation is empty"
            self.check_prompt(prompt)
            self.check_prompt(prompt + tokens[:-1])
        handle = Handle(self._loop)
        gather = Gather(len(continuations), on_done)
        handle.submit(
            tuple(
                Request(
                    tokens=prompt + tokens,
                    num_prompt=len(prompt),
                    scoring=True,
                    logprobs_from=len(prompt),
                    namespace=cache_salt,
                    on_done=for_sample(gather, i),
                )
                for i, tokens in enumerate(continuations)
            )
        )
        return handle

    @property
    def beginning(self) -> array[int]:
        """The token behind which a text begins that has nothing before it: the model's BOS, else one of its ends."""
        tokenizer = self.tokenizer
        return array("i", [tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids, default=0)])

    def seam(self, prompt: array[int], plain_bytes: int) -> array[int]:
        """The tokens at the end of a prompt that healing decides again: see `healing.py`."""
        held = self._healer.hold_back(prompt, plain_bytes)
        return prompt[len(prompt) - len(held.tokens) :] if held else array("i")

    def prompt_tokens(self, prompt: str | Sequence[int]) -> array[int]:
        """The ids of a prompt: text is encoded as the start of a conversation, ids are checked."""
        if isinstance(prompt, str):
            if not prompt.isascii() and re.search("[\ud800-\udfff]", prompt):
                raise RequestError("the prompt has half a character in it: a surrogate without its other half.")
            return array("i", self.tokenizer.encode(prompt, at_start=True, control=True))
        return self._checked(prompt)

    def continuation_tokens(self, text: str | Sequence[int]) -> array[int]:
        """The ids of a text that continues another."""
        tokens = (
            array("i", self.tokenizer.encode(text, at_start=False, control=True))
            if isinstance(text, str)
            else self._checked(text)
        )
        if not tokens:
            raise RequestError("score: a continuation is empty; it needs at least one token.")
        return tokens

    @property
    def stats(self) -> Stats:
        """What was done so far, and the state of the slots, between two steps."""
        return self._ask(lambda _: self._loop.stats())

    def render_tree(self, form: Literal["text", "dot"] = "text") -> str:
        """The radix tree, one node a line; "dot" is for Graphviz and shows the tokens as text."""
        if form == "dot":
            return self._ask(lambda scheduler: as_dot(scheduler.tree, self.tokenizer.decode))
        return self._ask(lambda scheduler: scheduler.tree.render())

    @property
    def tree(self) -> TreePicture:
        """The radix tree now: text where it is printed, a picture where a notebook shows it."""
        return self._ask(self._picture)

    def record(self) -> Film:
        """`with engine.record() as film:` takes a picture after each step; `film.save("film.html")` is a page of them.

        Each picture walks the whole tree, so steps are slower while it records.
        """

        def begin(film: Film) -> None:
            def watch(scheduler: Scheduler) -> None:
                film.add(self._picture(scheduler))

            watching[film] = watch
            self._ask(watch)
            self._ask(lambda _: self._loop.watchers.append(watch))

        def end(film: Film) -> None:
            watch = watching.pop(film)
            self._ask(lambda _: self._loop.watchers.remove(watch))
            self._ask(watch)

        watching: dict[Film, Callable[[Scheduler], None]] = {}
        return Film(begin, end)

    def _picture(self, scheduler: Scheduler) -> TreePicture:
        evicted = self._tiers.held if self._tiers is not None else (0, 0)
        return picture(scheduler.tree, self.tokenizer.decode, evicted)

    def check(self) -> None:
        """Assert the invariants of tree and pool; walks the whole tree."""
        self._ask(lambda scheduler: scheduler.tree.check())
        if self._tiers is not None:
            tiers = self._tiers
            self._ask(lambda _: tiers.check())

    def reset_cache(self) -> int:
        """Forget every prefix that no request uses, in all tiers; returns the number of slots that became free."""

        def reset(scheduler: Scheduler) -> int:
            if self._tiers is not None:
                self._tiers.clear()
            return scheduler.tree.reset()

        return self._ask(reset)

    def save_cache(self, path: str | Path) -> int:
        """Write every cached prefix, with its keys and values, to one safetensors file; returns the number of tokens.

        What is computed already is copied between two steps and written while the engine goes on. Prefixes that were
        evicted to host memory or disk are not in it. The file tells prompts to who can read it: it is made readable
        by its owner only.

        Raises:
            CacheError: the file cannot be written; an older one of this name is as it was.
            RequestError: the engine runs in several processes, of which each has a part of the keys and values.
        """
        self._check_alone("save_cache")
        target = Path(path).expanduser()
        copied = self._ask(lambda scheduler: saved.copy_tree(scheduler.tree, self._pool))
        saved.write(copied, target, self._cached_for)
        return len(copied.tokens)

    def load_cache(self, path: str | Path) -> int:
        """Add the prefixes of a saved cache to this one; returns the number of tokens added.

        Prefixes that are here stay, and nothing is evicted: what is new is added while slots are free, the most
        recently used first. The file must have been saved with the same weights (`saved.weights_fingerprint` says
        how that is seen), tokenizer, dtype and page size.

        Raises:
            CacheError: the file cannot be read, is torn, or was saved by another model; nothing has changed.
            RequestError: as for `save_cache`.
        """
        self._check_alone("load_cache")
        found = saved.read(Path(path).expanduser(), self._cached_for, self.model.vocab_size, self._pool)
        return self._ask(lambda scheduler: saved.merge(found, scheduler.tree, self._pool))

    def _ask(self, query: Callable[[Scheduler], T]) -> T:
        self._check_process()
        answer: Future[T] = Future()
        self._loop.post(Ask(query, answer))
        return answer.result()

    def _check_alone(self, what: str) -> None:
        if (size := self.config.tensor_parallel) > 1:
            raise RequestError(f"Engine: {what} is for engines of one process; this one has {size}.")

    def _checked(self, tokens: Sequence[int]) -> array[int]:
        try:
            return array("i", map(operator.index, tokens))
        except (TypeError, OverflowError) as error:
            raise RequestError(f"a prompt must be a text or a sequence of token ids: {error}.") from None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosed("this process was forked from the one that made the engine; make one in each process.")

    def check_prompt(self, prompt: array[int]) -> None:
        """Refuse a prompt that cannot be computed, with a `RequestError` or `OutOfSlots` that says why."""
        self._check_process()
        if not prompt:
            raise RequestError("the prompt is empty; write some text first.")
        if min(prompt) < 0 or max(prompt) >= self.model.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self.model.vocab_size)
            raise RequestError(
                f"{wrong} is not a token id of this model, whose ids are 0 to {self.model.vocab_size - 1}. "
                "If it comes from text, the tokenizer knows more tokens than the model."
            )
        if len(prompt) >= self.context_length:
            raise RequestTooLong(
                f"the prompt has {len(prompt)} tokens, and the context of this engine {self.context_length}, "
                "one of them for the answer. Shorten the prompt."
            )
        if len(prompt) > self.num_slots:
            raise OutOfSlots(wanted=len(prompt), free=self.num_slots, total=self.num_slots, prompt_alone=True)


def judged(on_done: Callable[[Any], None], constraint: Constraint | None) -> Callable[[Any], None]:
    """`on_done`, told also what the constraint could not hold, and whether the text fulfils it all the same."""
    if constraint is None or not constraint.warnings:
        return on_done
    return partial(_judge, on_done, constraint)


def _judge(on_done: Callable[[Any], None], constraint: Constraint, result: object) -> None:
    if isinstance(result, Result):
        violation = constraint.violation(result.text) if result.complete else ""
        result = replace(result, exact=constraint.exact, warnings=constraint.warnings, violation=violation)
    on_done(result)
