"""The checks for a GPU run to their end on a CPU: none fails there but for what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_check_that_can_be_tried_on_a_cpu_passes(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    command = [sys.executable, ROOT / "benchmarks/gpu/check.py", "--device", "cpu", "--small", "--out", out]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    verdicts = {line["name"]: line["verdict"] for line in lines if line["kind"] == "verdict"}
    assert "FAIL" not in verdicts.values()
    assert {name for name, verdict in verdicts.items() if verdict == "SKIP"} == {
        "our kernels: rows", "our kernels: attention", "small: idle",
    }  # fmt: skip
    assert len(verdicts) > 15
