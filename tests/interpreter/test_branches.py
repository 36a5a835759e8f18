from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from branchwise.interpreter import Cancelled, GenerationError, Scripted, State, UnknownVariable, function
from branchwise.lang import CallError, Gen, LangError, OptionError, Text, assistant, gen, user

Make = Callable[..., Scripted]
Eventually = Callable[[Callable[[], bool]], None]


def run(write: Callable[[State], Any], backend: Scripted, **options: Any) -> State:
    return function(lambda s: write(s)).run(backend=backend, **options)


def test_join_gathers_what_is_new_as_lists_in_order(scripted: Make) -> None:
    def write(s: State) -> None:
        s["old"] = "parent"
        branches = s.fork(3)
        branches += lambda i: f"Tip {i}: " + gen("tip")
        branches[1]["only"] = 5
        branches[2]["old"] = "branch"
        s["late"] = 1
        branches.join()
        assert s["tip"] == ["a", "b", "c"]
        assert s["only"] == [None, 5, None]
        assert (s["old"], s["late"]) == ("parent", 1)
        assert branches["tip"] == ["a", "b", "c"]
        assert [branch.text() for branch in branches] == ["Tip 0: a", "Tip 1: b", "Tip 2: c"]
        branches.join()
        s += "|".join(s["tip"])

    assert run(write, scripted({"tip": ["a", "b", "c"]})).text() == "a|b|c"


def test_branches_are_a_sequence(scripted: Make) -> None:
    def write(s: State) -> None:
        branches = s.fork(3)
        assert len(branches) == 3
        assert list(branches) == [branches[0], branches[1], branches[-1]]
        assert branches[1:] == [branches[1], branches[2]]
        with pytest.raises(IndexError):
            branches[3]
        with pytest.raises(UnknownVariable):
            branches["nope"]
        with pytest.raises(LangError, match=r"a branch cannot be replaced"):
            branches[0] = branches[1]
        with pytest.raises(LangError, match=r"Write branches \+= \.\.\., which appends to each of them"):
            branches + "x"

    run(write, scripted({}))


@pytest.mark.parametrize("repetition", range(20))
def test_branches_start_from_the_whole_of_an_unfinished_parent(repetition: int, scripted: Make) -> None:
    def write(s: State) -> None:
        s += "A:" + gen("a")
        branches = s.fork(4)
        branches += " B:" + gen("b")
        for branch in branches:
            assert branch["a"] == "12345678"
            assert branch.text() == "A:12345678 B:bb"
        branches.join()

    backend = scripted({"a": "12345678", "b": "bb"}, delay_s=0.0005)
    run(write, backend)
    assert [call.prompt for call in backend.calls] == ["A:"] + ["A:12345678 B:"] * 4


def test_nothing_leaks_between_branches_and_their_parent(scripted: Make) -> None:
    def write(s: State) -> None:
        s["k"] = "parent"
        branches = s.fork(2)
        branches[0]["k"] = "zero"
        branches[0] += gen("only0")
        s["late"] = 1
        s += "more"
        assert branches[1]["k"] == "parent"
        assert s["k"] == "parent"
        assert "only0" not in s
        assert "only0" not in branches[1]
        assert all("late" not in branch and "more" not in branch.text() for branch in branches)

    run(write, scripted({"only0": "x"}))


def test_an_empty_state_can_be_forked(scripted: Make) -> None:
    def write(s: State) -> None:
        s += ""
        branches = s.fork(2).__iadd__(gen("t"))
        branches.join()
        assert s["t"] == ["x", "x"]

    assert run(write, scripted({"t": "x"})).text() == ""


def test_forks_of_forks_are_independent(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "r"
        outer = s.fork(2)
        outer += lambda i: f"/{i}"
        inner = [branch.fork(2) for branch in outer]
        for group in inner:
            group += lambda i: f"/{i}" + gen("x")
            group.join()
        outer.join()
        assert [leaf.text() for group in inner for leaf in group] == ["r/0/0x", "r/0/1x", "r/1/0x", "r/1/1x"]
        assert s["x"] == [["x", "x"], ["x", "x"]]

    run(write, scripted({"x": "x"}, delay_s=0.001))


def test_a_fork_without_a_number_is_one_branch_and_an_unknown_option_is_refused(scripted: Make) -> None:
    def write(s: State) -> None:
        assert len(s.fork()) == 1
        with pytest.raises(CallError) as caught:
            s.fork(size=3)  # type: ignore[arg-type]  # wrong on purpose: it is refused
        assert str(caught.value) == "fork(): there is no option size. Write s.fork(3) for three branches."

    run(write, scripted({}))


def test_join_appends_what_the_branches_said_since_the_fork(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "Tips: "
        s["old"] = "o"
        branches = s.fork(3)
        branches += lambda i: f"{i}. " + gen("tip", n=1) + "; "
        branches.join("append")
        assert s["tip"] == ["a<|im_end|>", "b", "c"]
        s += gen("end")

    backend = scripted({"tip": ["a<|im_end|>", "b", "c"], "end": "E"}, delay_s=0.001)
    state = run(write, backend)
    assert state.text() == "Tips: 0. a<|im_end|>; 1. b; 2. c; E"
    assert backend.calls[-1].prompt == "Tips: 0. a<|im_end|>; 1. b; 2. c; "
    assert Text("a<|im_end|>", control=False) in backend.calls[-1].segments, "what a model wrote is no control token"


def test_join_appends_whole_turns_and_the_name_of_sglang_means_the_same(scripted: Make) -> None:
    def write(s: State) -> None:
        branches = s.fork(2)
        branches += lambda i: user(f"Q{i}") + assistant(gen("a"))
        branches.join("concate_and_append")

    assert run(write, scripted({"a": ["x", "y"]})).messages() == [
        {"role": "user", "content": "Q0"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "y"},
    ]


def test_a_vote_sets_what_most_branches_found(scripted: Make) -> None:
    def write(s: State) -> None:
        branches = s.fork(5)
        branches += gen("answer") + gen("other")
        branches[3]["only"] = {"some": "value"}
        branches.join("vote")

    state = run(write, scripted({"answer": ["4", "5", "5", "4", "6"], "other": "x"}))
    assert (state["answer"], state["other"], state["only"]) == ("4", "x", {"some": "value"})
    assert state.text() == ""


def racing(asked: Any) -> str | Exception:
    """Branch 1 is the quickest, branch 2 fails at once, the others take very long."""
    prompt = asked.prompt.removeprefix("Go ")
    return ValueError("boom") if prompt == "2" else "quick" if prompt == "1" else "x" * 100_000


def test_the_first_branch_to_finish_wins_and_the_others_are_given_back(scripted: Make, eventually: Eventually) -> None:
    def write(s: State) -> None:
        s += "Go "
        branches = s.fork(4)
        branches += lambda i: f"{i}" + gen("x")
        winner = branches.first()
        assert winner is branches[1]
        assert winner["x"] == "quick"
        eventually(lambda: backend.open_sessions == 2)
        with pytest.raises(Cancelled, match="branch 1 was the first to finish"):
            branches[0]["x"]
        with pytest.raises(GenerationError, match="boom"):
            branches[2]["x"]
        assert "x" not in s
        winner += "!"
        assert winner.text() == "Go 1quick!"

    backend = scripted(racing, delay_s=0.001, piece_len=1)
    run(write, backend)


def test_the_state_goes_on_as_the_first_branch_to_finish(scripted: Make) -> None:
    def write(s: State) -> None:
        s += "Go "
        with s.fork(4) as branches:
            branches += lambda i: f"{i}" + gen("x")
            branches.join("first")
        assert s["x"] == "quick"

    assert run(write, scripted(racing, delay_s=0.001, piece_len=1)).text() == "Go 1quick"


def test_the_first_of_branches_that_all_fail_raises_for_the_first_by_index(scripted: Make) -> None:
    def write(s: State) -> None:
        branches = s.fork(3)
        branches += lambda i: f"{i}" + gen("x")
        with pytest.raises(GenerationError, match=r'^gen\("x"\): 0') as caught:
            branches.first()
        assert caught.value.__notes__[-1] == "It was raised by branch 0 of 3."
        with pytest.raises(GenerationError, match=r'^gen\("x"\): 0'):
            branches.join("first")

    run(write, scripted(lambda asked: ValueError(asked.prompt), delay_s=0.001))


def test_a_join_in_no_known_mode_is_refused(scripted: Make) -> None:
    def write(s: State) -> None:
        branches = s.fork(2)
        branches += gen("x")
        with pytest.raises(OptionError) as caught:
            branches.join("votes")  # type: ignore[arg-type]  # wrong on purpose
        assert str(caught.value) == "join(): there is no mode 'votes' (str). Did you mean vote?"
        branches.join("gather_variable")

    assert run(write, scripted({"x": "1"}))["x"] == ["1", "1"]


def test_a_variable_that_is_elsewhere_is_looked_for_there(scripted: Make) -> None:
    def write(s: State) -> None:
        branches = s.fork(2)
        branches[0] += gen("x")
        s["late"] = 1
        reads: list[tuple[Callable[[], object], str]] = [
            (lambda: s["x"], 'A branch sets it: branches["x"] reads it there, branches.join() gathers it here.'),
            (lambda: branches[1]["x"], 'Another branch sets it: read it there, branches[...]["x"].'),
            (
                lambda: branches[1]["late"],
                "The state it was forked from sets it after the fork: write that before the fork.",
            ),
            (
                lambda: branches.__iadd__(lambda i: gen("own") + branches[i]["own"]),
                'Write s += gen("own") on a line before the one that reads it.',
            ),
        ]
        for read, where in reads:
            with pytest.raises(UnknownVariable) as caught:
                read()
            assert str(caught.value).endswith(f". {where}")

    run(write, scripted({"x": "1"}))


@pytest.mark.parametrize("count", [0, -1])
def test_a_fork_of_none_is_refused(count: int, scripted: Make) -> None:
    message = f"fork({count}): the number of branches must be at least 1, got {count}."
    with pytest.raises(OptionError) as caught:
        run(lambda s: s.fork(count), scripted({}))
    assert str(caught.value) == message


def test_join_waits_for_all_and_raises_the_failure_of_the_first_branch_that_failed(scripted: Make) -> None:
    def answer(asked: Any) -> str | Exception:
        return ValueError(asked.prompt) if asked.prompt in "12" else "x" * 40

    def write(s: State) -> None:
        branches = s.fork(4)
        branches += lambda i: f"{i}" + gen("x")
        with pytest.raises(GenerationError) as caught:
            branches.join()
        assert str(caught.value) == 'gen("x"): 1'
        assert caught.value.__notes__[-1] == "It was raised by branch 1 of 4."
        assert all(branches[i]._transcript.find("x").done for i in range(4)), "the others were waited for"
        assert branches[0]["x"] == branches[3]["x"] == "x" * 40
        with pytest.raises(GenerationError, match=r'^gen\("x"\): 2'):
            branches[2]["x"]
        with pytest.raises(GenerationError, match=r'^gen\("x"\): 1'):
            branches["x"]
        assert "x" not in s
        s += "the parent goes on"

    assert run(write, scripted(answer, delay_s=0.002)).text() == "the parent goes on"


def test_a_failed_parent_fails_the_branches_that_did_not_start(scripted: Make) -> None:
    def write(s: State) -> None:
        s += gen("bad")
        branches = s.fork(2)
        branches += gen("x")
        with pytest.raises(GenerationError, match=r'^gen\("bad"\): boom'):
            branches.join()
        with pytest.raises(GenerationError, match=r'^gen\("bad"\): boom'):
            branches[1]["x"]

    with pytest.raises(GenerationError, match=r'^gen\("bad"\): boom'):
        run(write, scripted({"bad": ValueError("boom"), "x": "x"}, delay_s=0.001))


def test_a_block_of_branches_is_joined_and_closed(scripted: Make, eventually: Eventually) -> None:
    def write(s: State) -> None:
        with s.fork(3) as branches:
            branches += gen("x")
        assert s["x"] == ["a", "b", "c"]
        assert branches[1].text() == "b"
        eventually(lambda: backend.open_sessions == 1)
        branches += gen("x")
        with pytest.raises(Cancelled, match="the branches were closed"):
            branches.join()

    backend = scripted({"x": ["a", "b", "c"]}, delay_s=0.001)
    run(write, backend)


def test_a_block_of_branches_that_raises_cancels_them(scripted: Make, eventually: Eventually) -> None:
    def write(s: State) -> None:
        began = time.monotonic()
        with pytest.raises(ValueError, match="mine"), s.fork(2) as branches:
            branches += gen("long")
            raise ValueError("mine")
        assert time.monotonic() - began < 1
        eventually(lambda: backend.open_sessions == 1)

    backend = scripted({"long": "x" * 100_000}, delay_s=0.001, piece_len=1)
    run(write, backend)


def test_the_first_good_branch_is_enough(scripted: Make, eventually: Eventually) -> None:
    def answer(asked: Any) -> str:
        return "quick" if asked.prompt == "0" else "x" * 100_000

    def write(s: State) -> str:
        with s.fork(2) as branches:
            branches += lambda i: f"{i}" + gen("x")
            found: str = branches[0]["x"]
            branches.cancel()
        return found

    assert run(write, scripted(answer, delay_s=0.001, piece_len=1)).ret_value == "quick"


def test_dropped_branches_give_their_sessions_back(scripted: Make, eventually: Eventually) -> None:
    def write(s: State) -> None:
        s.fork(4).__iadd__(gen("long"))
        eventually(lambda: backend.open_sessions == 1)

    backend = scripted({"long": "x" * 100_000}, delay_s=0.001, piece_len=1)
    run(write, backend)


@pytest.mark.timeout(60)
def test_a_thousand_states_of_eight_branches_need_few_threads(scripted: Make) -> None:
    most = 0

    @function
    def program(s: State, i: int) -> None:
        nonlocal most
        s += f"{i}:" + gen("a")
        branches = s.fork(8)
        branches += gen("b")
        branches.join()
        most = max(most, threading.active_count())

    def answer(asked: Any) -> str:
        assert isinstance(asked.op, Gen)
        return asked.prompt if asked.op.name == "b" else "A"

    before = threading.active_count()
    backend = scripted(answer, delay_s=0.0001)
    states = program.run_batch([{"i": i} for i in range(1_000)], num_threads=16, backend=backend)
    assert [state["b"] for state in states] == [[f"{i}:A"] * 8 for i in range(1_000)]
    assert most <= before + 15 + 2, "helping threads, the backend's clock, the reaper"
    assert backend.opened == 9_000


def test_many_states_at_a_time_need_no_thread_each(scripted: Make) -> None:
    backend = scripted({"a": "A" * 8, "b": "B"}, delay_s=0.01)
    program = function(lambda s: None)
    before = threading.active_count()
    states = [program.run(backend=backend) for _ in range(300)]
    groups = []
    for state in states:
        state += gen("a")
        groups.append(state.fork(8).__iadd__(gen("b")))
    assert threading.active_count() - before < 8
    for state, group in zip(states, groups, strict=True):
        group.join()
        assert state["b"] == ["B"] * 8
