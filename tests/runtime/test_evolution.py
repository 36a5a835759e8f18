"""Nine moments in the life of a tree: chats, a split, an eviction, a batch, a return, and samples.

After the picture in the SGLang paper (Zheng et al., "Efficiently Programming Large Language Models using SGLang",
figure 3), with a real engine and a pool that holds just so much.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from branchwise.runtime import Engine, Result

SYSTEM = list(range(10, 30))
EXAMPLES = list(range(100, 140))


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, num_slots=120) as engine:
        yield engine
        engine.check()


def ask(engine: Engine, prompt: list[int], new: int = 5) -> Result:
    return engine.generate(prompt, max_tokens=new, temperature=0, ignore_eos=True)


def edges(engine: Engine) -> list[tuple[int, int]]:
    """The depth and the number of tokens of each node, depth first, children in order of age."""
    drawn = engine.render_tree().splitlines()[1:]
    sizes = [line.split(" slots=")[0].strip() for line in drawn]
    return [
        (
            (len(line) - len(line.lstrip())) // 2,
            int(size.split(", ... ")[1].split()[0]) if "..." in size else size.count(",") + 1,
        )
        for line, size in zip(drawn, sizes, strict=True)
    ]


def test_the_tree_grows_splits_sheds_and_shares_as_its_requests_come(engine: Engine) -> None:
    # 1: nothing is cached
    assert engine.render_tree() in ("", "root")

    # 2: a first chat: system prompt and question are one edge, the answer hangs below
    hello = [*SYSTEM, 40, 41, 42]
    first = ask(engine, hello)
    assert first.hit_tokens == 0
    assert edges(engine) == [(1, 23), (2, 4)]

    # 3: its second turn goes on where the answer ended
    second_turn = [*hello, *first.tokens, 43, 44]
    second = ask(engine, second_turn)
    assert second.hit_tokens == len(hello) + 4
    assert edges(engine)[0] == (1, 23)

    # 4: another chat with the same system prompt splits the edge
    other = ask(engine, [*SYSTEM, 50, 51])
    assert other.hit_tokens == len(SYSTEM)
    assert edges(engine)[0] == (1, 20)
    assert sum(depth == 2 for depth, _ in edges(engine)) == 2

    # 5: a few-shot question needs room: what was least recently used goes, from its end
    before = engine.stats
    ask(engine, [*EXAMPLES, 60, 61, 62], new=12)
    assert engine.stats.since(before).evicted_slots == 0
    ask(engine, list(range(200, 226)), new=3)
    assert engine.stats.since(before).evicted_slots > 0
    assert ask(engine, [*SYSTEM, 50, 51], new=1).hit_tokens == len(SYSTEM) + 1

    # 6: a batch of few-shot questions shares the examples, which are cached already
    questions = [[*EXAMPLES, 70 + i, 71 + i] for i in range(3)]
    assert [ask(engine, question, new=2).hit_tokens for question in questions] == [40, 40, 40]

    # 7: the examples have branches now
    assert any(size == 40 for depth, size in edges(engine) if depth == 1)

    # 8: the first chat comes back; what of it was evicted is computed again, and the answer is the same
    again = ask(engine, second_turn)
    assert again.tokens == second.tokens
    assert again.hit_tokens >= len(SYSTEM)

    # 9: self-consistency: samples of one question are branches of its node
    before = engine.stats
    samples = engine.generate([*EXAMPLES, 80, 81], n=4, max_tokens=4, temperature=1.5, seed=5, ignore_eos=True)
    assert len({sample.tokens for sample in samples}) > 1
    counted = engine.stats.since(before)
    assert counted.computed_tokens <= 2 + 4 * 3
    assert counted.hit_tokens >= 4 * 40
