"""Clearing up behind states, also in processes that were forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

START = """
import os, sys, threading, time
from branchwise import Scripted, function, gen
from branchwise.interpreter.reaper import REAPER

program = function(lambda s: s.__iadd__(gen("x")))
parents = Scripted({"x": "X"})
state = program.run(backend=parents)
"""

DROPPED = """
child = os.fork()
if child == 0:
    del state
    program.run(backend=Scripted({"x": "Y"}))
    time.sleep(0.3)
    sys.exit(parents.closed)  # it is not the child's to close
print("ended", os.waitpid(child, 0)[1])
"""

LOCKED = """
def fork_while_locked():
    with REAPER._lock:
        forked.wait()

forked = threading.Event()
other = threading.Thread(target=fork_while_locked)
other.start()
child = os.fork()
if child == 0:
    program.run(backend=Scripted({"x": "Y"}))
    sys.exit(0)
forked.set()
other.join()
print("ended", os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.parametrize("script", [DROPPED, LOCKED])
def test_a_forked_child_runs_and_gives_back_programs_of_its_own_and_ends(script: str) -> None:
    started = subprocess.Popen([sys.executable, "-c", START + script], stdout=-1, start_new_session=True, text=True)
    try:
        assert started.communicate(timeout=30)[0] == "ended 0\n"
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)  # the child too
        raise
