"""What can be seen of a server from outside: figures for Prometheus, and a line in the log for each request."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from branchwise import runtime

from .gate import Gate

log = logging.getLogger("branchwise.serve")

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTS = (
    ("prompt_tokens", "Tokens of all prompts."),
    ("hit_tokens", "Tokens of prompts that were in the cache."),
    ("computed_tokens", "Rows of forward passes that computed a token for the first time."),
    ("generated_tokens", "Tokens that were sampled or forced."),
    ("forced_tokens", "Tokens that a constraint forced."),
    ("steps", "Forward passes."),
    ("step_s", "Seconds in steps."),
    ("retracted", "Times a running request was sent back to wait."),
    ("evicted_slots", "Slots whose tokens were forgotten."),
)
SLOTS = ("free", "evictable", "pinned", "protected", "held")


class _EngineFigures(Collector):
    """The engine's counters, asked for when somebody looks."""

    def __init__(self, engine: runtime.Engine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield GaugeMetricFamily("branchwise_requests_running", "Texts in the current step.", stats.running)
        yield GaugeMetricFamily("branchwise_requests_waiting", "Texts that wait for a step.", stats.waiting)
        yield GaugeMetricFamily("branchwise_texts_inside", "Texts that were let in.", self._gate.inside)
        yield CounterMetricFamily("branchwise_refused", "Requests refused because of the load.", self._gate.refused)
        slots = GaugeMetricFamily("branchwise_slots", "Slots by what keeps them.", labels=["state"])
        for state in SLOTS:
            slots.add_metric([state], getattr(stats, f"{state}_slots"))
        yield slots
        for name, text in COUNTS:
            told = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
            yield CounterMetricFamily(f"branchwise_{told}", text, getattr(stats, name))
        rate = stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        yield GaugeMetricFamily("branchwise_hit_rate", "Share of prompt tokens found in the cache.", rate)


class Figures:
    """The figures of one server."""

    def __init__(self, engine: runtime.Engine, gate: Gate) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineFigures(engine, gate))
        self.requests = Counter(
            "branchwise_requests", "Requests by path and status.", ["path", "status"], registry=registry
        )
        self._first = Histogram(
            "branchwise_time_to_first_token_seconds", "From a text's arrival to its first token.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "branchwise_time_between_tokens_seconds", "Mean time between a text's tokens.",
            buckets=(0.001, 0.0025, *SECONDS), registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            "branchwise_text_seconds", "From a text's arrival to its end.", buckets=SECONDS, registry=registry
        )

    def count(self, result: runtime.Result) -> None:
        """A text has ended."""
        times = result.times
        self._whole.observe(times.total_s)
        if times.first_token_s is not None:
            self._first.observe(times.first_token_s)
            if len(result.tokens) > 1:
                self._between.observe((times.total_s - times.first_token_s) / (len(result.tokens) - 1))

    def page(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


def log_request(request_id: str, method: str, path: str, status: int, began: float, usage: dict[str, Any]) -> None:
    """One line of JSON: who asked what and how long it took; nothing of what was said."""
    line = {
        "request_id": request_id,
        "method": method,
        "path": path,
        "status": status,
        "ms": round((time.monotonic() - began) * 1000, 1),
        **usage,
    }
    log.info(json.dumps(line))
