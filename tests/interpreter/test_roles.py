from __future__ import annotations

from collections.abc import Callable

import pytest

from branchwise.interpreter import Scripted, State, function
from branchwise.lang import (
    LangError,
    RoleBegin,
    RoleEnd,
    Text,
    assistant_begin,
    assistant_end,
    gen,
    role,
    user,
    user_begin,
)

Make = Callable[..., Scripted]


def with_expressions(s: State) -> None:
    s += user("Hi")
    s += assistant_begin() + gen("a") + assistant_end()


def with_calls(s: State) -> None:
    s.user("Hi")
    s.assistant(gen("a"))


def with_begin_and_end(s: State) -> None:
    s.user_begin()
    s += "Hi"
    s.user_end()
    s.assistant_begin()
    s += gen("a")
    s.assistant_end()


def with_blocks(s: State) -> None:
    with s.user():
        s += "Hi"
    with s.assistant() as inside:
        assert inside is s
        s += gen("a")


@pytest.mark.parametrize("write", [with_expressions, with_calls, with_begin_and_end, with_blocks])
def test_all_forms_of_a_role_say_the_same(write: Callable[[State], None], scripted: Make) -> None:
    backend = scripted({"a": "Hello"})
    state = function(write).run(backend=backend)
    assert backend.calls[0].segments == (RoleBegin("user"), Text("Hi"), RoleEnd("user"), RoleBegin("assistant"))
    assert state.messages() == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda s: s.assistant_end(), "assistant_end() without assistant_begin()."),
        (
            lambda s: s.__iadd__(user_begin() + user_begin()),
            "user_begin() inside the turn of user. End that first with user_end().",
        ),
        (
            lambda s: s.__iadd__(user("a" + role("tool", "b"))),
            "tool_begin() inside the turn of user. End that first with user_end().",
        ),
        (
            lambda s: s.__iadd__(user_begin() + assistant_end()),
            "assistant_end() inside the turn of user. Write user_end().",
        ),
    ],
)
def test_roles_that_do_not_fit_are_refused_where_they_are_written(
    write: Callable[[State], object], message: str, scripted: Make
) -> None:
    def body(s: State) -> None:
        with pytest.raises(LangError) as caught:
            write(s)
        assert str(caught.value) == message
        s.user("still fine")

    assert function(body).run(backend=scripted({})).text() == "still fine"


@pytest.mark.parametrize(
    "go_on",
    [
        lambda s: None,
        lambda s: s.__iadd__("forgot the with"),
        lambda s: s.assistant(gen("a")),
        lambda s: s.assistant(),
        lambda s: s.sync(),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_block_of_a_turn_that_is_not_entered_is_refused(
    go_on: Callable[[State], object], stream: bool, scripted: Make
) -> None:
    def write(s: State) -> None:
        s.user()
        go_on(s)

    with pytest.raises(LangError) as caught:
        function(write).run(backend=scripted({}), stream=stream).sync()
    assert str(caught.value) == 's.user() alone begins no turn. Write "with s.user():" or s.user("...").'


def test_a_turn_that_was_begun_may_stay_open(scripted: Make) -> None:
    def write(s: State) -> None:
        s.assistant_begin()
        s += "Sure"

    assert function(write).run(backend=scripted({})).messages() == [{"role": "assistant", "content": "Sure"}]


def test_a_branch_knows_the_turn_it_stands_in(scripted: Make) -> None:
    def write(s: State) -> None:
        with s.assistant():
            branches = s.fork(2)
            branches += gen("a")
            branches[0].assistant_end()
            branches[0].user("next")
        assert branches[0].messages()[-1] == {"role": "user", "content": "next"}
        branches[1].assistant_end()

    function(write).run(backend=scripted({"a": "x"}))


def test_a_block_that_raises_ends_its_turn_and_lets_the_error_through(scripted: Make) -> None:
    def write(s: State) -> None:
        with pytest.raises(ValueError, match="mine"), s.user():
            raise ValueError("mine")
        s.user("again")

    function(write).run(backend=scripted({}))
