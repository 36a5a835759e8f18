"""What an engine has done so far, and where its slots are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters since the engine was made; the last four are a state, not a count.

    prompt_tokens: tokens of all prompts, each request's in full.
    hit_tokens: those of them that were in the tree when the request was admitted, or came there in the same step.
    computed_tokens: rows of forward passes that computed a token for the first time.
    repeated_rows: rows computed again, for their logits only.
    generated_tokens: tokens sampled.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    repeated_rows: int = 0
    generated_tokens: int = 0
    steps: int = 0
    retracted: int = 0
    evicted_slots: int = 0
    free_slots: int = 0
    evictable_slots: int = 0
    protected_slots: int = 0
    num_slots: int = 0

    def since(self, before: Stats) -> Stats:
        """The counts between two moments; the state of the slots is the later one's."""
        state = {"free_slots", "evictable_slots", "protected_slots", "num_slots"}
        names = [f.name for f in dataclasses.fields(self) if f.name not in state]
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(before, name) for name in names})

    @property
    def hits(self) -> str:
        """What sharing saved, in words."""
        share = f", {self.hit_tokens / self.prompt_tokens:.0%}" if self.prompt_tokens else ""
        return f"prefix hits: {self.hit_tokens} of {self.prompt_tokens} prompt tokens{share}"

    def __str__(self) -> str:
        return (
            f"{self.hits} | {self.generated_tokens} generated in {self.steps} steps | "
            f"slots: {self.free_slots} free, {self.evictable_slots} cached, {self.protected_slots} in use"
        )
