"""What `s.meta(name)` told, as what it is: a test knows whether it generated or selected."""

from __future__ import annotations

from branchwise import Completion, Selection, State


def completion_of(state: State, name: str = "x") -> Completion:
    meta = state.meta(name)
    assert isinstance(meta, Completion)
    return meta


def selection_of(state: State, name: str = "x") -> Selection:
    meta = state.meta(name)
    assert isinstance(meta, Selection)
    return meta
