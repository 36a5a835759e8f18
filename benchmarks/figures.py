"""What the benchmarks of constraints have in common, in whatever environment they run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def spread(values: Iterable[float], scale: float) -> str:
    """Median, 95th percentile and greatest of `values`, each times `scale`."""
    ordered = sorted(value * scale for value in values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.5, 0.95)]
    return f"p50 {at[0]:.1f}, p95 {at[1]:.1f}, max {ordered[-1]:.1f}"


def read(path: Path) -> list[dict[str, Any]]:
    """A file of one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
