"""What an engine has done so far, and where its slots are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


def _state() -> Any:
    """A field that says how things are, not how often something happened."""
    return field(default=0, metadata={"state": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters since the engine was made, and the state of its slots and queues at one moment.

    prompt_tokens: tokens of all prompts, each request's in full.
    hit_tokens: those of them that were in the tree when the request was admitted, or came back from a tier.
    best_hit_tokens: those that would have been, if of the requests that waited when it came those had gone first that
        begin like it: what the best order could have found.
    computed_tokens: rows of forward passes that computed a token for the first time.
    repeated_rows: rows computed again, for their logits only.
    generated_tokens: tokens that were sampled or forced.
    forced_tokens: those of them that were not sampled: a constraint left no choice.
    retracted: times a running request was sent back to wait.
    spilled_tokens: evicted tokens that were copied to host memory, and maybe on to disk.
    restored_tokens: tokens that were copied back from there.
    first_step_s: seconds from arrival to the end of the first step, of all requests together.
    step_s: seconds in steps.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    best_hit_tokens: int = 0
    computed_tokens: int = 0
    repeated_rows: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    steps: int = 0
    retracted: int = 0
    evicted_slots: int = 0
    spilled_tokens: int = 0
    restored_tokens: int = 0
    first_step_s: float = 0.0
    step_s: float = 0.0
    waiting: int = _state()
    running: int = _state()
    free_slots: int = _state()
    evictable_slots: int = _state()
    pinned_slots: int = _state()
    protected_slots: int = _state()
    held_slots: int = _state()
    num_slots: int = _state()

    def since(self, before: Stats) -> Stats:
        """The counts between two moments; the state is the later one's."""
        counts = [f.name for f in dataclasses.fields(self) if not f.metadata.get("state")]
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(before, name) for name in counts})

    @property
    def hits(self) -> str:
        """What sharing saved, in words."""
        share = f", {self.hit_tokens / self.prompt_tokens:.0%}" if self.prompt_tokens else ""
        return f"prefix hits: {self.hit_tokens} of {self.prompt_tokens} prompt tokens{share}"

    def __str__(self) -> str:
        step_ms = 1000 * self.step_s / self.steps if self.steps else 0.0
        wait_ms = 1000 * self.first_step_s / self.requests if self.requests else 0.0
        rows = {
            "requests": f"{self.requests}, {self.running} running, {self.waiting} waiting, {self.retracted} retracted",
            "prefix hits": f"{self.hits.removeprefix('prefix hits: ')}; {self.best_hit_tokens} in the best order",
            "computed": f"{self.computed_tokens} tokens, {self.repeated_rows} rows again for their logits",
            "generated": f"{self.generated_tokens} tokens, {self.forced_tokens} of them forced",
            "steps": f"{self.steps}, {step_ms:.1f} ms each; {wait_ms:.1f} ms to the end of a request's first",
            "slots": f"{self.free_slots} free, {self.evictable_slots} cached, {self.pinned_slots} pinned, "
            f"{self.protected_slots + self.held_slots} in use of {self.num_slots}; {self.evicted_slots} evicted so far",
        }
        if self.spilled_tokens:
            rows["tiers"] = f"{self.spilled_tokens} evicted tokens copied there, {self.restored_tokens} brought back"
        return "\n".join(f"{name:<12}{value}" for name, value in rows.items())
