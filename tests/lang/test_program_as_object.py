"""A program among Python's other objects: pickled, copied, wrapped, a method."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchwise.interpreter import Scripted, State, function
from branchwise.lang import GenOptions, LangError, gen


@function(max_tokens=7)
def ask(s: State, q: str, tone: str = "plain") -> str:
    """Answers."""
    s += f"{q} ({tone}) " + gen("a")
    return s["a"]  # type: ignore[no-any-return]


@function
async def ask_later(s: Any, q: str) -> None:
    s += q


def plain(s: State, q: str) -> None:
    s += q


named_otherwise = function(temperature=0.5)(plain)


class Agent:
    def __init__(self, name: str) -> None:
        self.name = name

    @function
    def ask(self, s: State, q: str) -> str:
        s += f"{self.name}: {q} " + gen("a")
        return s["a"]  # type: ignore[no-any-return]

    @staticmethod
    @function
    def greet(s: State) -> str:
        return "hello"


def again(program: Any) -> Any:
    return pickle.loads(pickle.dumps(program))


def backend() -> Scripted:
    return Scripted({"a": "A"})


def test_a_pickled_program_is_the_one_of_its_name() -> None:
    assert again(ask) is ask
    assert again(ask_later) is ask_later
    assert copy.copy(ask) is ask
    assert copy.deepcopy({"program": ask})["program"] is ask


def test_bound_arguments_are_pickled_with_it() -> None:
    bound = again(ask.bind(tone="warm"))
    assert bound.run(q="why", backend=backend()).text() == "why (warm) A"
    assert bound.defaults == GenOptions(max_tokens=7)


def test_a_program_of_a_plain_function_is_pickled_with_that() -> None:
    program = again(named_otherwise)
    assert program.run("why", backend=backend()).text() == "why"
    assert program.defaults == GenOptions(temperature=0.5)


def test_a_method_is_pickled_with_its_instance() -> None:
    program = again(Agent("Ada").ask.bind(q="why"))
    assert program.run(backend=backend()).text() == "Ada: why A"


def test_what_python_cannot_pickle_is_refused_as_python_does() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(function(lambda s: None))


SENT = """
from branchwise import Scripted, function, gen

@function
def ask(s, q):
    s += q + gen("a")

def run_there(program):
    return program.run(backend=Scripted({"a": "A"})).text()
"""
SENDS = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import sent

with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
    print(pool.submit(sent.run_there, sent.ask.bind(q="why")).result())
"""


def test_a_program_can_be_sent_to_another_process(tmp_path: Path) -> None:
    (tmp_path / "sent.py").write_text(SENT)
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
    ended = subprocess.run([sys.executable, "-c", SENDS], env=env, capture_output=True, text=True, check=True)
    assert ended.stdout == "whyA\n"


def test_it_looks_like_its_function() -> None:
    assert (ask.__name__, ask.__doc__, ask.__module__) == ("ask", "Answers.", __name__)  # type: ignore[attr-defined]
    assert list(inspect.signature(ask).parameters) == ["s", "q", "tone"]
    assert inspect.unwrap(ask) is ask.__wrapped__  # type: ignore[attr-defined]
    assert not ask.is_async
    assert ask_later.is_async


def logged(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        log.append(fn.__name__)
        return fn(*args, **kwargs)

    return wrapper


log: list[str] = []


def test_a_decorator_below_is_part_of_the_program() -> None:
    @function
    @logged
    def wrapped(s: State, q: str) -> None:
        s += q

    log.clear()
    assert wrapped.run(q="why", backend=backend()).text() == "why"
    assert log == ["wrapped"]


def test_a_decorator_above_calls_it_in_another_program() -> None:
    outer = function(lambda s: logged(ask)(s, "why"))
    log.clear()
    assert outer.run(backend=backend()).text() == "why (plain) A"
    assert log == ["ask"]


def test_a_partial_of_a_function_is_a_program() -> None:
    assert function(functools.partial(plain, q="why")).run(backend=backend()).text() == "why"


def test_a_method_runs_in_every_way() -> None:
    agent, on = Agent("Ada"), backend()
    assert agent.ask.run("why", backend=on).text() == "Ada: why A"
    assert [state.text() for state in agent.ask.run_batch([{"q": "1"}, {"q": "2"}], backend=on)] == [
        "Ada: 1 A",
        "Ada: 2 A",
    ]
    assert agent.ask.stream("why", backend=on).text() == "Ada: why A"
    assert function(lambda s: agent.ask(s, "why")).run(backend=on).ret_value == "A"


def test_a_static_method_is_a_program_of_the_class_and_of_instances() -> None:
    assert Agent.greet.run(backend=backend()).ret_value == Agent("x").greet.run(backend=backend()).ret_value == "hello"


def test_a_class_method_is_decorated_the_other_way_round() -> None:
    with pytest.raises(LangError, match="@function needs a function"):

        class Wrong:
            @function  # type: ignore[arg-type]
            @classmethod
            def ask(cls, s: State) -> None: ...


def test_programs_call_themselves() -> None:
    @function
    def countdown(s: State, n: int) -> int:
        s += f"{n} "
        return 1 + countdown(s, n - 1) if n else 0

    assert (state := countdown.run(5, backend=backend())).text() == "5 4 3 2 1 0 "
    assert state.ret_value == 5
