"""Themes 5 and 11, where errors surface: each test is a case, by its number. Their other cases stand elsewhere."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from branchwise import ConstraintError, Engine, State, function, gen


def test_079_a_pattern_that_is_wrong_is_an_error_at_its_line_in_every_way_to_run(engine: Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "x"
        s += gen("a", regex="(")  # here
        s += gen("b")

    def run() -> None:
        program.run(backend=engine)

    def batch() -> None:
        program.run_batch([{}, {}], backend=engine)

    def stream() -> None:
        list(program.run(stream=True, backend=engine).text_iter())

    for way in (run, batch, stream):
        with pytest.raises(ConstraintError, match=r'gen\("a", regex="\("\): the group .* is never closed') as caught:
            way()
        assert "# here" in "".join(traceback.format_exception(caught.value))
    both = program.run_batch([{}, {}], backend=engine, return_exceptions=True)
    assert [type(error) for error in both] == [ConstraintError] * 2


ONE_RUN = """
from branchwise import Engine, EngineError, function, gen
@function
def program(s):
    s += "a" + gen("x", max_tokens=4, ignore_eos=True)
engine = Engine({model!r}, num_slots=512)
print(len(program.run(backend=engine)["x"]) > 0)
"""
CHILD = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about threads and fork
pid = os.fork()
if pid == 0:
    try:
        program.run(backend=engine)
    except Exception as error:
        print(error)
    print("the child ends", flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.slow
def test_143_an_engine_says_that_it_cannot_be_used_in_a_forked_process(tiny_model: Path) -> None:
    code = ONE_RUN.format(model=str(tiny_model)) + CHILD
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    first, error, end = done.stdout.splitlines()
    assert (first, end) == ("True", "the child ends")
    assert "fork" in error
