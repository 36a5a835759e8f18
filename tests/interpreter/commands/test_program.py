"""A program by its file and name, and arguments as the command line has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchwise.interpreter.commands.errors import WrongArgument
from branchwise.interpreter.commands.program import load_program, read_arguments

ONE = """
from branchwise import function
@function
def greet(s, name: str, times: int = 1, *, tags=()):
    s["got"] = (name, times, tags)
"""
TWO = ONE + "\n@function\ndef part(s): ...\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "one_program.py").write_text(ONE)
    return tmp_path / "one_program.py"


def test_the_only_program_of_a_file_needs_no_name(file: Path) -> None:
    assert load_program(str(file)).name == load_program(f"{file}:greet").name == "greet"


def test_a_program_that_is_imported_is_not_the_files_own(file: Path, tmp_path: Path) -> None:
    user = tmp_path / "its_user.py"
    user.write_text("from one_program import greet\nfrom branchwise import function\n@function\ndef own(s): ...\n")
    assert load_program(str(user)).name == "own"
    assert load_program(f"{user}:greet").name == "greet"


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    two = tmp_path / "two_programs.py"
    two.write_text(TWO)
    with pytest.raises(WrongArgument, match=r"has no program 'gret'\. It has: greet, part\. Did you mean greet\?$"):
        load_program(f"{two}:gret")
    with pytest.raises(WrongArgument, match=r"^which .*\? It has: greet, part\. Write .*two_programs\.py:NAME\.$"):
        load_program(str(two))
    with pytest.raises(WrongArgument, match=r"^there is no file nowhere\.py\."):
        load_program("nowhere.py:x")


def test_values_are_json_but_text_where_the_parameter_is_a_str(file: Path) -> None:
    program = load_program(str(file))
    given = read_arguments(program, ["name=42", "times=3", 'tags=["a", "b"]'])
    assert given == {"name": "42", "times": 3, "tags": ["a", "b"]}
    assert read_arguments(program, ["name=a=b", "tags=plain text"]) == {"name": "a=b", "tags": "plain text"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nam=x"], r"^greet has no argument 'nam'\. It takes: name, times, tags\. Did you mean name\?$"),
        (["times=2"], r"^greet lacks an argument\. Add --arg name=VALUE$"),
        (["name"], r"^--arg name: write --arg NAME=VALUE\.$"),
    ],
)
def test_wrong_arguments_are_named(file: Path, given: list[str], said: str) -> None:
    with pytest.raises(WrongArgument, match=said):
        read_arguments(load_program(str(file)), given)
