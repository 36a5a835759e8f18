"""A user's program, type-checked against the built wheel: what the public names promise must hold there."""

from __future__ import annotations

from typing import assert_type

import branchwise as bw


@bw.function
def tips(s: bw.State, topic: str) -> None:
    s += bw.system("Answer briefly.") + bw.user(f"Two tips on {topic}, please.")
    s += bw.assistant(bw.gen("plan", max_tokens=16, stop="\n"))
    with s.fork(2) as branches:
        branches += lambda index: f"Tip {index + 1}: " + bw.gen("tip", max_tokens=8, temperature=0.5)
        branches.join()
    s += bw.select("kind", choices=["short", "long"])


@bw.function
async def awaited(s: bw.AsyncState, topic: str) -> str:
    s += f"A tip on {topic}: " + bw.gen("tip", max_tokens=8)
    async for piece in s.text_async_iter("tip"):
        assert_type(piece, str)
    async with s.fork(3) as branches:
        branches += bw.gen("more")
        assert_type(branches[0], bw.AsyncState)
        await branches.join("vote")
    return assert_type(await s.text(), str)


@bw.function
def searched(s: bw.State) -> list[int]:
    branches = s.fork(4)
    branches += bw.gen("tip")
    assert_type(branches.first(), bw.State)
    assert_type(bw.parallel.best_of(s.fork(2), lambda branch: len(branch.text())), bw.State)
    assert_type(bw.parallel.vote(["yes", "no"]), str)
    return assert_type(s.map(["a", "b"], lambda branch, item: len(item)), list[int])


async def on_a_loop(backend: bw.Scripted) -> None:
    assert_type(await awaited.arun(topic="sleep", backend=backend), bw.State)
    async for piece in tips.stream(topic="sleep", backend=backend).text_async_iter():
        assert_type(piece, str)
    for state in tips.run_batch([{"topic": "sleep"}], generator_style=True, backend=backend):
        print(state["tip"])


def ask(model: str) -> bw.State:
    with bw.Engine(model) as engine:
        state = tips.run(topic="sleep", backend=engine)
        assert_type(state, bw.State)
        assert_type(state.text(), str)
        return state


def scripted() -> bw.State:
    try:
        return tips.run(topic="sleep", backend=bw.Scripted({"plan": "1. Rest.", "tip": "Sleep."}))
    except (bw.LangError, bw.RunError, bw.EngineError):
        raise
