"""Commands as a shell sees them: exit codes, what goes to stdout, colours or none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from branchwise.__main__ import main

ROOT = Path(__file__).parents[3]
PROGRAM = """
from branchwise import function, gen, select

@function(temperature=0, max_tokens=3)
def tell(s, topic: str):
    s += f"The {topic}" + gen("rest") + select("mood", [" yes", " no"])
    branches = s.fork(2)
    branches += lambda i: f" Tip {i}:" + gen("tip")
    branches.join()
    return {"rest": s["rest"], "tips": s["tip"]}

@function
def fails(s):
    s += gen("x", max_tokens=1)
    raise ValueError("the program's own")

@function
def lacks(s):
    return s["nothing"]
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "told.py").write_text(PROGRAM)
    return f"{tmp_path / 'told.py'}:tell"


def run(*arguments: str) -> int:
    return main(["run", *arguments])


def test_help_teaches_and_loads_nothing_heavy() -> None:
    code = "import sys; from branchwise.__main__ import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(*sys.modules)"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "branchwise run facts.py:facts --arg country=Japan --show" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not {"torch", "numpy", "rich", "transformers", "branchwise.runtime"} & loaded


def test_json_is_all_that_stdout_has(program: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(program, "--model", str(tiny_model), "--arg", "topic=river", "--json") == 0
    printed = capsys.readouterr()
    told: dict[str, Any] = json.loads(printed.out)
    assert told["text"].startswith("The river")
    assert told["value"] == {"rest": told["variables"]["rest"], "tips": told["variables"]["tip"]}
    assert told["prompt_tokens"] > told["hit_tokens"] > 0
    assert told["arguments"] == {"topic": "river"}
    assert printed.err == ""


def test_quiet_prints_the_value_and_nothing_else(
    program: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(program, "--model", str(tiny_model), "--arg", "topic=river", "--quiet") == 0
    quiet = capsys.readouterr()
    assert set(json.loads(quiet.out)) == {"rest", "tips"}
    assert quiet.err == ""
    assert run(program, "--model", str(tiny_model), "--arg", "topic=river") == 0
    loud = capsys.readouterr()
    assert loud.out == quiet.out
    assert loud.err.startswith("prefix hits: ")


def test_show_has_branches_and_no_escape_codes_where_nobody_sees_colours(
    program: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(program, "--model", str(tiny_model), "--arg", "topic=river", "--show") == 0
    shown = capsys.readouterr().out
    assert "fork of 2\n├── 0  Tip 0:‹tip›" in shown
    assert "\x1b" not in shown


def test_exit_codes(program: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(tiny_model)]
    file = program.partition(":")[0]
    assert run(f"{file}:lacks", *model) == 1
    assert 'branchwise: error: there is no variable "nothing"' in capsys.readouterr().err
    assert run(f"{file}:tell", *model) == 2
    assert "tell lacks an argument. Add --arg topic=VALUE" in capsys.readouterr().err
    assert run(f"{file}:tell", "--arg", "topic=x", "--model", "no-such-model") == 1
    assert "no known model of that name" in capsys.readouterr().err
    assert run(f"{file}:fails", *model) == 1
    failed = capsys.readouterr().err
    assert "ValueError: the program's own" in failed
    assert "interpreter/" not in failed  # the user's lines, not ours
    with pytest.raises(SystemExit) as wrong:
        main(["run"])
    assert wrong.value.code == 2


def test_an_interrupt_exits_with_130(
    program: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("branchwise.lang.Program.run", interrupted)
    assert run(program, "--model", str(tiny_model), "--arg", "topic=x") == 130
    assert capsys.readouterr().err.endswith("branchwise: interrupted\n")


@pytest.mark.slow
def test_chat_reads_a_pipe_and_takes_turns_back(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = "What is the capital of France?\nAnd of Italy?\n/retry\n/undo\n/undo\n/undo\n/tree\n"
    monkeypatch.setattr("sys.stdin", StringIO(turns))
    assert main(["chat", "--temperature", "0", "--max-tokens", "20"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("The capital of France is Paris.\n") == 1
    assert printed.out.count("The capital of Italy is Rome.\n") == 2
    assert "taken back: What is the capital of France?" in printed.out
    assert printed.out.count("there is no turn to take back") == 1
    assert printed.out.rstrip().splitlines()[-1].strip().startswith("└")  # the tree
    assert printed.err == ""


@pytest.mark.slow
def test_demo_shows_forks_answers_and_what_was_saved(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert "├── 0  capital‹fact› Tokyo" in printed
    assert "Person(name='Marie Curie', born=1867, profession='physicist')" in printed
    assert "What sharing saved" in printed
    assert "\x1b" not in printed


@pytest.mark.slow
def test_tree_plays_nine_moments_and_writes_the_film(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    film = tmp_path / "evolution.html"
    assert main(["tree", "--film", str(film)]) == 0
    printed = re.sub(r"\x1b\[[012]?m", "", capsys.readouterr().out)  # bold and dim are no colours
    assert "\x1b" not in printed
    assert re.findall(r"^(\d)  \S", printed, re.MULTILINE) == list("123456789")
    for change in ("(evicted, or its end)", "+ Great food!", "prefix hits: 17 of 30 prompt tokens, 57%"):
        assert change in printed
    page = film.read_text()
    assert page.startswith("<!doctype html>")
    assert all(f'"chapter":"{number}  ' in page for number in range(1, 10))


def test_bench_says_what_sharing_saves_and_that_it_changes_nothing(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--json", "--model", str(tiny_model)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3
    for one in found:
        assert one["same_answers"]
        assert one["alone_tokens"] > 2 * one["shared_tokens"]


def test_colours_are_there_where_they_are_seen(
    program: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(program, "--model", str(tiny_model), "--arg", "topic=river", "--show") == 0
    assert "\x1b[32m" in capsys.readouterr().out  # a sampled token is green


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m  ")
