"""The examples run on the demo model, and print an answer and what sharing saved."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from branchwise import Engine

EXAMPLES = [p for p in sorted((Path(__file__).parents[1] / "examples").glob("*.py")) if p.stem != "__main__"]
DOCS_PAGE = (Path(__file__).parents[1] / "docs" / "examples.md").read_text(encoding="utf-8")
HITS = re.compile(r"^prefix hits: .*\n", re.MULTILINE)
"""Not the same each time: a batch may keep what its runs begin with, which is one more request."""

EXPECTED = {
    "agent": ["Action: calculate 45 + 87\nResult: 132\n", "Action: answer 132", "Action: search the White Rabbit"],
    "character": ["Ron Weasley: ", "HUFFLEPUFF"],
    "chat": ["assistant: The capital of France is Paris.", "user: Which language do people speak there?"],
    "classify": ['speech     "Is he married or single?"', "12 of 14 are right"],
    "code_helper": ["def shortest(text):\n    return min(words(text), key=len)"],
    "compare_prompts": ["hot                       100", "right                     0                         5"],
    "dates": ["1989-11-29  The Berlin Wall falls"],
    "extraction": ["Marie Curie, physicist, 1867", "27 of 73 tokens were forced"],
    "few_shot": ["What is the capital of Japan?", "Tokyo", "Leonardo da Vinci"],
    "generative_agents": ["In the morning, Ann is in the bakery to make bread."],
    "judge": ["An apple a day: Clarity 3, Grammar 5", "weak", "strong"],
    "parallel_tips": ["1. Eat", "2. Keep your bedroom", "3. Exercise", "The most important of these is to"],
    "query": ["SELECT COUNT(*) FROM towns WHERE population > 50000;"],
    "rag": ["  pink   (from: So she", "  Ishmael   (from: Call me Ishmael."],
    "rewind": ["The capital of France is Paris.", "(rewound by one turn)", "French"],
    "self_consistency": ["The vote: 20"],
    "skeleton": ["How do I stay healthy?", "2. Get enough sleep: Your body needs"],
    "tree_of_thought": ["From 3 to 26:", " = 26"],
    "tool_call": ["Look(tool='look_up', country='France') -> Paris", "operator='+', right=25) -> 42"],
}


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[Engine]:
    with Engine(demo_model, num_slots=8192) as engine:
        yield engine


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_its_answer_and_its_prefix_hits(
    path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.reset_cache()  # what others left there is no hit of this one's
    load(path).main(engine)
    printed = capsys.readouterr().out
    for text in EXPECTED[path.stem]:
        assert text in printed
    told = f"```text\n{HITS.sub('', printed)}```"
    assert told in HITS.sub("", DOCS_PAGE), "run python docs/pictures.py examples, and look at what has changed"
    found = re.search(r"prefix hits: (\d+) of (\d+) prompt tokens, \d+%", printed)
    assert found is not None
    assert 0.4 < int(found[1]) / int(found[2]) < 1
    engine.check()
    assert engine.stats.protected_slots == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_shows(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 80
    assert re.fullmatch(r'""".+\."""', lines[0])
