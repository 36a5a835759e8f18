"""In a notebook's kernel, where an event loop runs in each cell: programs run, are interrupted, and run again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

LIMIT_S = 60.0

SETUP = """
from branchwise import function, gen
from branchwise.interpreter import Scripted

backend = Scripted({"a": "A", "long": "x" * 1_000_000}, delay_s=0.001, piece_len=1)

@function
def short(s):
    s += gen("a")

@function
async def awaited(s):
    s += gen("a")
    await s.sync()

@function
def forever(s):
    branches = s.fork(2)
    branches += gen("long")
    branches.join()

@function
async def forever_awaited(s):
    s += gen("long")
    await s["long"]
"""


class Kernel:
    """A kernel of its own, and its cells."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self._manager = KernelManager()
        self._manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]  # type: ignore[assignment]  # a traitlet
        self._manager.start_kernel(env={**os.environ, "PYTHONPATH": str(root)}, cwd=str(root))
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT_S)

    def start(self, code: str) -> str:
        return self._client.execute(code)

    def wait_for_output(self) -> None:
        while self._client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "stream":
            pass

    def end_of(self, cell: str) -> tuple[str, str]:
        """Its error ("" if there is none) and what it printed and showed."""
        error, shown = "", ""
        while True:
            message = self._client.get_iopub_msg(timeout=LIMIT_S)
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "error":
                    error = content["ename"]
                case "stream":
                    shown += content["text"]
                case "execute_result" | "display_data":
                    shown += content["data"].get("text/html", content["data"]["text/plain"])
                case "status" if content["execution_state"] == "idle":
                    return error, shown

    def run(self, code: str) -> tuple[str, str]:
        return self.end_of(self.start(code))

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        assert kernel.run(SETUP) == ("", "")
        yield kernel
    finally:
        kernel.close()


RUNS = [
    'print(short.run(backend=backend)["a"])',
    'print(awaited.run(backend=backend)["a"])',
    'print((await awaited.arun(backend=backend))["a"])',
    'print(short.run_batch([{}] * 3, backend=backend)[2]["a"])',
    'print("".join(short.run(stream=True, backend=backend).text_iter()))',
    'async for piece in short.run(stream=True, backend=backend).text_async_iter(): print(piece)',
]

# What a cell awaits is the kernel's own to interrupt, and no business of ours.
INTERRUPTED = [
    "forever.run(backend=backend)",
    "forever_awaited.run(backend=backend)",
    "forever.run_batch([{}] * 50, backend=backend)",
    "list(forever_awaited.run(stream=True, backend=backend).text_iter())",
]


@pytest.mark.parametrize("code", RUNS)
def test_programs_run_in_a_cell(kernel: Kernel, code: str) -> None:
    assert kernel.run(code) == ("", "A\n")


@pytest.mark.parametrize("code", INTERRUPTED)
def test_an_interrupted_cell_ends_and_the_next_one_runs(kernel: Kernel, code: str) -> None:
    cell = kernel.start(f"print('begun', flush=True)\n{code}")
    kernel.wait_for_output()
    time.sleep(0.3)
    kernel.interrupt()
    error, _ = kernel.end_of(cell)
    assert error == "KeyboardInterrupt"
    assert kernel.run(RUNS[0]) == ("", "A\n")
    left = "import time\nfor _ in range(200):\n    if not backend.open_sessions: break\n    time.sleep(0.05)\n"
    assert kernel.run(left + "print(backend.open_sessions)") == ("", "0\n")


def test_a_state_is_shown_as_a_page(kernel: Kernel) -> None:
    error, shown = kernel.run("short.run(backend=backend)")
    assert error == ""
    assert "<style" in shown
    assert ">A<" in shown
