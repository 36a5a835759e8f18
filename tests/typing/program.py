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
