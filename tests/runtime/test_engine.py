"""The engine as its caller sees it: counting, errors, cancelling, ending."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.runtime import (
    ConstraintError,
    Engine,
    EngineClosed,
    EngineError,
    GenerateParams,
    OutOfSlots,
    RequestError,
    RequestTooLong,
    Result,
    WeightsError,
)
from branchwise.runtime.model import StepInput


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, num_slots=2048, seed=0) as engine:
        yield engine
        assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Nothing runs, nothing is locked, no slot is lost."""
    engine.check()
    stats = engine.stats
    assert stats.protected_slots == 0
    assert stats.free_slots + stats.evictable_slots == stats.num_slots


class Rows:
    """Counts the rows that pass through a model, and can make passes fail."""

    def __init__(self, engine: Engine) -> None:
        self.counts: list[int] = []
        self.fail_next = 0
        self._forward = engine.model.forward
        engine.model.forward = self  # type: ignore[method-assign,assignment]  # a spy in its place

    def __call__(self, step: StepInput) -> Tensor:
        self.counts.append(len(step.tokens))
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the device is on fire")
        return self._forward(step)


def start(engine: Engine, prompt: list[int], **options: Any) -> tuple[Any, list[Result | Exception], threading.Event]:
    """Start one greedy generation that does not end by itself."""
    results: list[Result | Exception] = []
    done = threading.Event()

    def on_done(sample: int, result: Result | Exception) -> None:
        results.append(result)
        done.set()

    params = GenerateParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": 10**6, **options})
    return engine.start(array("i", prompt), params, on_done=on_done), results, done


# --------------------------------------------------------------------------------------------- what sharing saves


def test_eight_samples_over_a_long_prompt_take_the_slots_and_the_rows_of_one_prompt_and_eight_answers(
    engine: Engine,
) -> None:
    rows, prompt, new = Rows(engine), [3 + i % 300 for i in range(600)], 6
    results = engine.generate(prompt, n=8, max_tokens=new, temperature=1.5, ignore_eos=True, seed=11)
    paths = {(*prompt, *result.tokens[: new - 1]) for result in results}  # the last token is sampled, not computed
    distinct = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    assert len(paths) > 4
    assert engine.num_slots - engine.stats.free_slots == len(distinct)
    assert sum(rows.counts) == engine.stats.computed_tokens == len(distinct)


def test_requests_that_arrive_together_compute_their_prefix_once_and_none_waits_for_another(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=4096, max_step_tokens=2048) as engine:
        rows, shared = Rows(engine), [3 + i % 300 for i in range(1000)]
        engine.score(shared, [[5 + i, 9, 9] for i in range(64)])
        assert rows.counts == [1000 + 64 * 2]  # the last token of a text that is only scored needs no row


def test_greedy_twins_are_one_row_a_step(engine: Engine) -> None:
    rows = Rows(engine)
    engine.generate([5, 6, 7], n=8, max_tokens=10, temperature=0, ignore_eos=True)
    assert rows.counts == [3] + [1] * 9


def test_what_was_generated_is_a_hit_for_what_follows(engine: Engine) -> None:
    prompt = [5, 6, 7, 8]
    answer = engine.generate(prompt, max_tokens=10, temperature=0, ignore_eos=True)
    longer = engine.generate([*prompt, *answer.tokens, 9], max_tokens=1, temperature=0, ignore_eos=True)
    assert longer.hit_tokens == len(prompt) + 10 - 1


def bits(tensor: Tensor) -> Tensor:
    """A copy that compares as bits: what was never written may be NaN."""
    return tensor.clone().view(torch.int32)


def test_a_prompt_that_is_cached_whole_is_answered_alike_and_its_slots_are_not_written_again(engine: Engine) -> None:
    prompt = list(range(10, 43))
    first = [engine.generate(prompt[:end], max_tokens=1, temperature=0, ignore_eos=True).tokens for end in (33, 32, 1)]
    used = engine.stats.free_slots
    before = [bits(k) for k in engine._pool.k]
    again = [engine.generate(prompt[:end], max_tokens=1, temperature=0, ignore_eos=True) for end in (33, 32, 1)]
    assert [result.tokens for result in again] == first
    assert [result.hit_tokens for result in again] == [32, 31, 0]
    assert engine.stats.free_slots == used
    for now, then in zip(engine._pool.k, before, strict=True):
        assert torch.equal(bits(now)[:-1], then[:-1])  # the last row is the scratch slot


@pytest.mark.parametrize("warm", [False, True])
def test_scores_equal_the_log_probabilities_of_transformers(engine: Engine, warm: bool, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt, continuations = [7, 8, 9, 10], [[11, 12, 13], [11, 12], [14], [11, 12, 13, 15, 16]]
    if warm:
        engine.score(prompt, continuations)
    scores = engine.score(prompt, continuations)
    oracle = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for tokens, found in zip(continuations, scores, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-3)


# ----------------------------------------------------------------------------------------- seeds, stops, limits


def test_a_seeded_sample_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    def draw(n: int, **options: Any) -> list[Result]:
        return engine.generate([5, 6, 7], n=n, max_tokens=20, temperature=1.0, ignore_eos=True, **options)

    alone = draw(1, seed=42)[0].tokens
    background = start(engine, [9, 9, 9], temperature=1.0)[0]
    assert draw(8, seed=42)[0].tokens == alone
    background.cancel()
    assert draw(1, seed=43)[0].tokens != alone
    assert draw(1)[0].tokens != draw(1)[0].tokens


def test_a_stop_string_ends_the_text_and_cuts_the_token_it_stands_in(engine: Engine) -> None:
    text = "kilo lima mike november"
    whole = engine.generate([5], regex=text, max_tokens=60)
    assert (whole.text, whole.finish_reason, whole.detail) == (text, "stop", "constraint")
    cut = engine.generate([5], regex=text, max_tokens=60, stop=("ima mike nov",))
    assert (cut.text, cut.finish_reason, cut.detail) == ("kilo l", "stop", "'ima mike nov'")
    assert engine.tokenizer.decode(cut.tokens[: cut.kept]) + cut.tail == "kilo l"


def test_deltas_joined_are_the_text_and_hold_no_part_of_the_stop(engine: Engine) -> None:
    deltas: list[str] = []
    done = threading.Event()
    engine.start(
        array("i", [5]),
        GenerateParams(regex="Ok 😀 漢字 ñ, one lima two", stop=("lima two",), max_tokens=80),
        on_delta=lambda sample, delta: deltas.append(delta.text),
        on_done=lambda sample, result: done.set(),
    )
    assert done.wait(30)
    assert "".join(deltas) == "Ok 😀 漢字 ñ, one "
    assert all("�" not in delta and "li" not in delta for delta in deltas)
    assert len(deltas) > 8


@pytest.mark.parametrize(("max_tokens", "detail"), [(3, "max_tokens"), (200, "context")])
def test_limits_are_named(max_tokens: int, detail: str, tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=512, context_length=128) as engine:
        result = engine.generate(list(range(5, 125)), max_tokens=max_tokens, ignore_eos=True)
        assert (result.finish_reason, result.detail) == ("length", detail)
        assert len(result.tokens) == min(max_tokens, 8)


def test_a_constraint_with_end_tokens_ignored_goes_on_to_its_end(engine: Engine) -> None:
    results = engine.generate([5], regex="7{1,4}", ignore_eos=True, n=8, max_tokens=10)
    assert {result.text for result in results} == {"7777"}


def test_a_text_that_a_stop_cut_out_of_its_constraint_is_not_complete(engine: Engine) -> None:
    result = engine.generate([5], regex="abc end", stop=("end",), max_tokens=20)
    assert (result.text, result.finish_reason, result.complete) == ("abc ", "stop", False)


def test_a_character_that_was_only_begun_is_left_out_and_its_tokens_are_not_kept(engine: Engine) -> None:
    for max_tokens in range(1, 8):
        result = engine.generate([5], regex="😀😀", max_tokens=max_tokens)
        assert "😀😀".startswith(result.text)
        assert engine.tokenizer.decode(result.tokens[: result.kept]) == result.text


def test_scoring_nothing_gives_nothing_and_scoring_after_nothing_is_refused(engine: Engine) -> None:
    assert engine.score([5], []) == []
    with pytest.raises(RequestError, match=r"the prompt is empty; write some text first."):
        engine.score([], [[5, 6]])
    with pytest.raises(RequestError, match="continuations must be a list of texts or of token ids, got one text"):
        engine.score([5], "bcd")


def test_no_more_positions_than_the_model_has_can_be_asked_for(tiny_model: Path) -> None:
    with pytest.raises(RequestError, match="context_length 4000 is more than the 2048 positions that this model was"):
        Engine(tiny_model, num_slots=64, context_length=4000)


def test_a_constraint_that_was_cut_off_says_so(engine: Engine) -> None:
    result = engine.generate([5], regex=r"([0-9]{1,3}\.){3}[0-9]{1,3}", max_tokens=2)
    assert (result.finish_reason, result.complete, len(result.tokens)) == ("length", False, 2)


# --------------------------------------------------------------------------------------- salts, pins, limits of time


def test_requests_of_different_salts_share_nothing(engine: Engine) -> None:
    def hits(**options: Any) -> int:
        return engine.generate(list(range(5, 37)), max_tokens=1, temperature=0, **options).hit_tokens

    assert [hits(cache_salt="A"), hits(cache_salt="B"), hits(), hits(cache_salt="A")] == [0, 0, 0, 31]


def test_a_pinned_prefix_survives_what_evicts_everything_else(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=64) as engine:
        prefix = list(range(5, 25))
        with engine.hold(prefix) as pin:
            assert (pin.num_tokens, engine.stats.pinned_slots) == (20, 20)
            for start in range(30, 300, 30):
                engine.generate(list(range(start, start + 30)), max_tokens=4, ignore_eos=True)
            engine.reset_cache()
            assert engine.generate([*prefix, 7], max_tokens=1).hit_tokens == 20
        assert engine.stats.pinned_slots == 0
        pin.release()
        engine.reset_cache()
        assert engine.stats.free_slots == 64


def test_a_pin_that_would_fill_the_pool_is_refused(tiny_model: Path) -> None:
    with (
        Engine(tiny_model, num_slots=64) as engine,
        pytest.raises(OutOfSlots, match=r"pin\(\) needs 65 slots, 64 are free. Raise num_slots \(64\)"),
    ):
        engine.pin(list(range(5, 69)))


@pytest.mark.parametrize("max_running", [1, 4])
def test_a_request_that_takes_too_long_ends_with_what_it_has(max_running: int, tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=4096, max_running=max_running) as engine:
        other = start(engine, [5, 6])[0]
        result = engine.generate([5, 7], max_tokens=100_000, ignore_eos=True, timeout_s=0.2)
        assert (result.finish_reason, result.detail) == ("cancelled", "timeout")
        assert (len(result.tokens) > 0) == (max_running > 1)
        other.cancel()


def test_the_tree_is_drawn_for_graphviz_with_its_text(engine: Engine) -> None:
    text = 'The "river" runs'
    engine.generate(text, max_tokens=1)
    drawn = engine.render_tree("dot")
    assert drawn.startswith("digraph radix_tree {")
    assert rf'label="The \"river\" runs\n{len(engine.prompt_tokens(text))} tokens"' in drawn
    assert drawn.count("->") == 1


def test_a_result_says_how_long_it_waited_and_how_long_it_took(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=256, max_running=1) as one:
        done: list[Result] = []
        start = time.monotonic()
        results = one.generate("To be", n=2, max_tokens=8, ignore_eos=True)
        took = time.monotonic() - start
        done = sorted(results, key=lambda result: result.times.waiting_s)
    first, second = (result.times for result in done)
    for times in (first, second):
        assert times.first_token_s is not None
        assert 0 <= times.waiting_s <= times.first_token_s <= times.total_s <= took
    assert second.waiting_s >= first.first_token_s


def test_statistics_print_as_a_table(engine: Engine) -> None:
    engine.generate([5, 6, 7, 8], n=2, max_tokens=3, temperature=0, ignore_eos=True)
    lines = str(engine.stats).splitlines()
    names = ["requests", "prefix hits", "computed", "generated", "steps", "slots"]
    assert [line[:12].strip() for line in lines] == names
    assert lines[0] == "requests    2, 0 running, 0 waiting, 0 retracted"
    assert lines[1] == "prefix hits 3 of 8 prompt tokens, 38%; 3 in the best order"
    assert lines[2] == "computed    6 tokens, 0 rows again for their logits"


# ------------------------------------------------------------------------------------------------- wrong requests


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, RequestError, "the prompt is empty; write some text first."),
        ([400], {}, RequestError, "400 is not a token id of this model, whose ids are 0 to 399. If it comes from text"),
        ([-1], {}, RequestError, "-1 is not a token id of this model, whose ids are 0 to 399."),
        (
            [5],
            {"max_tokens": 0},
            RequestError,
            "max_tokens must be at least 1, got 0. To score given text, use score().",
        ),
        ([5], {"temperature": float("nan")}, RequestError, "temperature must be 0 or more, got nan."),
        ([5], {"top_p": 0}, RequestError, r"top_p must be in (0, 1], got 0."),
        ([5], {"stop": ("",)}, RequestError, "stop: an empty string is found in every text; leave it out of ['']."),
        (
            [5] * 3000,
            {},
            RequestTooLong,
            "the prompt has 3000 tokens, and the context of this engine 2048, one of them for",
        ),
        ([5] * 2047, {"num_slots": 64}, OutOfSlots, "the request needs 2047 slots, 64 are free. Raise num_slots (64)"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(
    prompt: list[int], options: dict[str, Any], error: type[Exception], message: str, tiny_model: Path
) -> None:
    with Engine(tiny_model, num_slots=options.pop("num_slots", 2048)) as engine:
        with pytest.raises(error) as caught:
            engine.generate(prompt, **options)
        assert str(caught.value).startswith(message)
        assert len(engine.generate([5], max_tokens=2, temperature=0, ignore_eos=True).tokens) == 2
        assert_idle(engine)


def test_a_bad_regex_fails_its_own_request_only(engine: Engine) -> None:
    handle, _, _ = start(engine, [5, 6])
    with pytest.raises(ConstraintError):
        engine.generate([5], regex="(")
    assert engine.generate([5], regex="[ab]{2}", max_tokens=9).complete
    handle.cancel()


def test_an_unknown_option_of_the_engine_is_named(tiny_model: Path) -> None:
    with pytest.raises(RequestError, match=r"^Engine: there is no option num_slot. Did you mean num_slots\?"):
        Engine(tiny_model, num_slot=3)


def test_a_request_that_outgrows_the_pool_alone_ends_with_what_it_has(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=64) as engine:
        result = engine.generate(list(range(5, 45)), max_tokens=100, ignore_eos=True, temperature=0)
        assert (result.finish_reason, result.detail) == ("length", "slots")
        assert len(result.tokens) == 64 - 40 + 1  # the last one has no slot yet
        assert len(engine.generate([5], max_tokens=2, ignore_eos=True).tokens) == 2
        assert_idle(engine)


# ------------------------------------------------------------------------------------------ cancelling and failing


def test_requests_are_cancelled_while_they_wait_or_run_and_twice_is_fine(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=2048, max_running=1, max_step_tokens=8) as engine:
        started = [start(engine, [number, *range(5, 105)]) for number in (5, 6, 7)]
        for index in (2, 0, 0):
            started[index][0].cancel()
        for index in (2, 0):
            assert started[index][2].wait(10)
            result = started[index][1][0]
            assert isinstance(result, Result)
            assert result.finish_reason == "cancelled"
        started[1][0].cancel()
        assert started[1][2].wait(10)
        assert [len(results) for _, results, _ in started] == [1, 1, 1]
        assert_idle(engine)


def test_a_step_that_fails_once_is_done_again_and_changes_nothing(engine: Engine) -> None:
    wanted = engine.generate(list(range(5, 40)), max_tokens=8, temperature=0, ignore_eos=True).tokens
    engine.reset_cache()
    rows = Rows(engine)
    rows.fail_next = 1
    assert engine.generate(list(range(5, 40)), max_tokens=8, temperature=0, ignore_eos=True).tokens == wanted


def test_a_step_that_fails_again_fails_its_requests_with_the_cause_and_the_engine_goes_on(engine: Engine) -> None:
    rows = Rows(engine)
    rows.fail_next = 2
    with pytest.raises(
        EngineError, match=r"its forward pass failed 2 times: RuntimeError.'the device is on fire'."
    ) as caught:
        engine.generate([5, 6, 7], max_tokens=3)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True).tokens) == 3


def test_one_request_that_cannot_be_computed_fails_alone(engine: Engine) -> None:
    forward = engine.model.forward

    def poisoned(step: StepInput) -> Tensor:
        if 399 in step.tokens.tolist():
            raise RuntimeError("399 is poison")
        return forward(step)

    engine.model.forward = poisoned  # type: ignore[method-assign]  # in its place
    good = [start(engine, [5 + i, 6, 7], max_tokens=12) for i in range(3)]
    bad = start(engine, [5, 6, 399], max_tokens=12)
    good += [start(engine, [5 + i, 8], max_tokens=12) for i in range(3)]
    assert all(done.wait(20) for _, _, done in [*good, bad])
    assert isinstance(bad[1][0], EngineError)
    assert "its forward pass failed 2 times: RuntimeError('399 is poison')" in str(bad[1][0])
    for _, (result,), _ in good:
        assert isinstance(result, Result)
        assert len(result.tokens) == 12


def test_an_engine_may_be_closed_by_its_own_threads(tiny_model: Path) -> None:
    engine = Engine(tiny_model, num_slots=64)
    engine._ask(lambda _: engine.close())
    with pytest.raises(EngineClosed, match="the engine was closed"):
        engine.generate([5])


def test_closing_fails_what_is_not_finished(tiny_model: Path) -> None:
    engine = Engine(tiny_model, num_slots=2048)
    _, results, done = start(engine, [5, 6])
    engine.close()
    engine.close()
    assert done.wait(10)
    assert isinstance(results[0], EngineClosed)
    with pytest.raises(EngineClosed, match=r"the engine was closed."):
        engine.generate([5])


def test_a_bug_in_the_loop_reaches_everybody_who_waits(tiny_model: Path) -> None:
    with Engine(tiny_model, num_slots=2048) as engine:
        _, results, done = start(engine, [5, 6])
        engine._loop._scheduler.tree.commit = None  # type: ignore[method-assign,assignment]  # breaks the loop
        assert done.wait(10)
        assert isinstance(results[0], EngineClosed)
        with pytest.raises(EngineClosed, match="the engine has ended: its step loop failed: TypeError"):
            engine.generate([5])


def test_an_engine_that_nobody_holds_ends_its_threads(tiny_model: Path) -> None:
    engine = Engine(tiny_model, num_slots=64)
    engine.generate([5], max_tokens=2)
    start(engine, [5, 6], max_tokens=3)[2].wait(10)
    assert engine.stats.requests == 2
    threads = list(engine._loop._threads)
    del engine
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in threads)


def run_script(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )


def test_a_script_that_does_not_close_its_engine_exits_quietly(tiny_model: Path) -> None:
    script = """
        import sys
        from branchwise import Engine
        print(len(Engine(sys.argv[1], num_slots=64).generate([5], max_tokens=2, ignore_eos=True).tokens))
        engine = Engine(sys.argv[1], num_slots=64)
        engine.generate([5], max_tokens=2)
    """
    done = run_script(script, str(tiny_model))
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_forked_process_is_told_that_the_engine_is_not_its_own(tiny_model: Path) -> None:
    script = """
        import os, sys
        from branchwise import Engine
        engine = Engine(sys.argv[1], num_slots=64)
        engine.generate([5], max_tokens=2)
        if (child := os.fork()) == 0:
            try:
                engine.generate([5], max_tokens=2)
            except Exception as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """
    done = run_script(script, str(tiny_model))
    assert done.stdout == "this process was forked from the one that made the engine; make one in each process.\n"


def test_weights_that_are_missing_are_named_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in tiny_model.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tiny_model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = set(threading.enumerate())
    with pytest.raises(
        WeightsError, match=r"1 weights do not fit the configuration: missing model.layers.1.mlp.up_proj.weight"
    ):
        Engine(tmp_path)
    assert {thread for thread in threading.enumerate() if thread.name.startswith("branchwise")} <= before
