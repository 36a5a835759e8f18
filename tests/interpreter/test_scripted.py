from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from branchwise.interpreter import GenerationError, Scripted, State, function
from branchwise.lang import RoleBegin, Select, Text, gen, select

Make = Callable[..., Scripted]


def run(write: Callable[[State], object], backend: Scripted) -> State:
    return function(lambda s: write(s)).run(backend=backend)


def test_it_keeps_what_it_was_asked(scripted: Make) -> None:
    backend = scripted({"a": "A", "b": "y"})
    run(lambda s: s.assistant("1" + gen("a", seed=3) + "2" + select("b", ["x", "y"])), backend)
    first, second = backend.calls
    assert (first.op.name, first.prompt) == ("a", "1")
    assert second.op == Select("b", ("x", "y"), heal=True)
    assert second.segments == (RoleBegin("assistant"), Text("1"), Text("A"), Text("2"))


def test_a_list_gives_one_answer_a_call_and_the_last_again(scripted: Make) -> None:
    state = run(lambda s: s.__iadd__(gen("a") + gen("a") + gen("a")), scripted({"a": ["1", "2"]}))
    assert state.text() == "122"


def test_the_earliest_stop_ends_the_text_whatever_their_order(scripted: Make) -> None:
    for stops in (["lo", "wor"], ["wor", "lo"]):
        stop = list(stops)
        state = run(lambda s, stop=stop: s.__iadd__(gen("a", stop=stop)), scripted({"a": "hello world"}))  # type: ignore[misc]  # bound in the loop
        assert state["a"] == "hel"
        assert state.meta("a").detail == "'lo'"  # type: ignore[union-attr]  # of a gen


def test_answers_can_be_computed(scripted: Make) -> None:
    backend = scripted(lambda asked: asked.prompt.upper())
    assert run(lambda s: s.__iadd__("abc" + gen("a")), backend)["a"] == "ABC"


def test_a_missing_answer_and_a_wrong_choice_are_failures(scripted: Make) -> None:
    with pytest.raises(GenerationError, match=r'^gen\("a"\): the script has no answer to this call'):
        run(lambda s: s.__iadd__(gen("a")), scripted({}))
    with pytest.raises(GenerationError, match=r"^select\(\): the script answers 'z', which is not one of the choices"):
        run(lambda s: s.__iadd__(select(choices=["a"])), scripted({None: "z"}))


def test_sessions_are_counted(scripted: Make) -> None:
    backend = scripted({"a": "A"})

    def write(s: State) -> None:
        branches = s.fork(3)
        branches.join()
        assert (backend.opened, backend.open_sessions) == (4, 4)
        branches.close()
        assert (backend.closed, backend.open_sessions) == (3, 1)

    run(write, backend)


def test_its_thread_is_there_only_while_there_is_something_to_tell(scripted: Make) -> None:
    backend = scripted({"a": "A" * 8}, delay_s=0.001)
    run(lambda s: s.__iadd__(gen("a")), backend)
    for thread in threading.enumerate():
        if thread.name == "scripted":
            thread.join(timeout=1)
            assert not thread.is_alive()
