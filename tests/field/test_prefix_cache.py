"""Theme 6: the radix tree as a cache of prefixes. Each test is a case, by its number."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from branchwise import Engine, State, function, gen
from branchwise.runtime.slots import SlotPool
from branchwise.runtime.tree import Node, RadixTree
from tests.told import completion_of

Tokens = list[int]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def fresh(tiny_model: Path) -> Iterator[Engine]:
    """With an empty cache."""
    with Engine(tiny_model, num_slots=8192, seed=0, defaults={"temperature": 0}) as engine:
        yield engine
        engine.check()


@torch.inference_mode()
def log_probabilities(oracle: torch.nn.Module, tokens: Tokens) -> torch.Tensor:
    found: torch.Tensor = oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return found


def greedy(engine: Engine, prompt: Tokens, count: int) -> Tokens:
    return list(engine.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True).tokens)


def test_088_a_prompt_that_is_cached_whole_has_a_next_token(fresh: Engine, oracle: torch.nn.Module) -> None:
    whole = list(range(10, 43))
    for prompt in (whole, whole, whole, whole[:-1], whole[:1]):
        result = fresh.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True)
        assert result.tokens == (int(log_probabilities(oracle, prompt)[-1].argmax()),)
        assert result.hit_tokens <= len(prompt) - 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_089_what_is_in_use_is_never_evicted_and_nothing_stays_locked(page_size: int, tiny_model: Path) -> None:
    rng, long = random.Random(0), list(range(10, 40))
    with Engine(tiny_model, num_slots=64, page_size=page_size) as engine:
        alone = greedy(engine, long, 20)
        for _ in range(10):
            engine.reset_cache()
            with ThreadPoolExecutor(4) as pool:
                answer = pool.submit(greedy, engine, long, 20)
                short = [
                    [*long[: rng.randint(0, 12)], *(rng.randrange(3, 400) for _ in range(3))] for _ in range(50)
                ]
                list(pool.map(lambda prompt: greedy(engine, prompt, 1), short))
                assert answer.result(60) == alone
            engine.check()
            stats = engine.stats
            assert (stats.protected_slots, stats.free_slots + stats.evictable_slots) == (0, 64)


def test_091_what_can_be_evicted_is_counted_right_through_every_split() -> None:
    """Ten thousand random steps; a dictionary of what was inserted knows what must be found."""
    rng, tree = random.Random(0), RadixTree(SlotPool(64))
    held: list[Node] = []
    for step in range(10_000):
        tokens = array("i", [rng.randrange(3) for _ in range(rng.randint(1, 12))])
        found = tree.match(tokens)
        match rng.choice(["insert", "insert", "lock", "unlock", "evict"]):
            case "insert" if len(tokens) <= tree.pool.num_free + tree.evictable - tree.evictable_on(found):
                node = tree.lock(found)
                if found.length < len(tokens):
                    node, _ = tree.append(node, tokens[found.length :])
                tree.commit()
                assert tree.match(tokens).length == len(tokens)
                tree.unlock(node)
            case "lock" if len(held) < 4:
                held.append(tree.lock(found))
            case "unlock" if held:
                tree.unlock(held.pop(rng.randrange(len(held))))
            case "evict":
                before = {id(node) for node in tree.nodes() if node.lock}
                tree.evict(rng.randint(1, 10))
                assert before <= {id(node) for node in tree.nodes()}
        assert tree.evictable >= 0 and tree.protected >= 0
        if step % 100 == 0:
            tree.check()


def test_092_pages_are_shared_whole_or_not_at_all() -> None:
    tree = RadixTree(SlotPool(64, 4))

    def insert(tokens: Tokens) -> None:
        found = tree.match(array("i", tokens))
        node = tree.lock(found)
        if found.length < len(tokens):
            node, _ = tree.append(node, array("i", tokens[found.length :]))
        tree.commit()
        tree.unlock(node)
        tree.check()

    def match(tokens: Tokens) -> int:
        return tree.match(array("i", tokens)).length

    a, b = list(range(8)), [0, 1, 2, 3, 4, 5, 99, 98]
    insert(a)
    found = [match(a[:7])]
    insert(b)
    assert [*found, match(a[:3]), match(a), match([*b, 1])] == [4, 0, 8, 8]
    assert sorted(len(node) for node in tree.nodes()) == [4, 4, 4]
    tree.evict(64)
    assert not list(tree.nodes())
    insert(a)
    assert match(a) == 8


@pytest.mark.parametrize("size", [33, 129])
def test_094_prompt_log_probabilities_are_the_same_from_a_warm_cache(
    size: int, fresh: Engine, oracle: torch.nn.Module
) -> None:
    prompt = [3 + i * 7 % 390 for i in range(size)]
    wanted = log_probabilities(oracle, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    for _ in range(2):
        result = fresh.generate(prompt, max_tokens=1, temperature=0, return_logprob=True, logprob_start=1)
        assert result.prompt_logprobs is not None
        assert [one.token for one in result.prompt_logprobs] == prompt[1:]
        found = torch.tensor([one.logprob for one in result.prompt_logprobs])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
    cold, warm = (fresh.score(prompt, [[7, 8], [9]]) for _ in range(2))
    torch.testing.assert_close(torch.tensor(cold[0]), torch.tensor(warm[0]), rtol=0, atol=1e-4)


def test_095_tenants_share_nothing_and_no_name_is_a_prefix(fresh: Engine) -> None:
    prompt = list(range(20, 52))

    def ask(salt: str | None) -> tuple[int, tuple[int, ...]]:
        result = fresh.generate(prompt, max_tokens=3, temperature=0, ignore_eos=True, cache_salt=salt)
        return result.hit_tokens, result.tokens

    asked = [ask(salt) for salt in ("A", "B", None, "A")]
    assert [hits for hits, _ in asked] == [0, 0, 0, 31]
    assert len({tokens for _, tokens in asked}) == 1
    for name in ("\x14", "", "20", "None", "root"):  # as a token, a number or a default would be written
        assert ask(name)[0] == 0


def test_097_a_second_generation_finds_all_that_the_first_one_computed(fresh: Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "The river runs past the old mill. " * 6
        s += gen("a", max_tokens=40, ignore_eos=True, heal=False)
        s += " And then, how deep is it there? "
        s += gen("b", max_tokens=5, heal=False)

    state = program.run(backend=fresh)
    first, second = (completion_of(state, name) for name in "ab")
    assert first.usage.completion_tokens == 40
    assert second.usage.hit_tokens >= first.usage.prompt_tokens + 40 - 1


def test_098_stops_leave_no_wrong_keys_behind(fresh: Engine) -> None:
    """What is in the tree afterwards gives the answers of an empty cache."""

    @function
    def program(s: State, i: int) -> None:
        s += "Q: What is it? A: a thing.\n\nQ: Why? A: So.\n\n" + f"Q: {i}? A:"
        s += gen("x", max_tokens=20, stop=["\n\n", "Q:", "a", "e"], ignore_eos=True)

    target = list(range(30, 70))
    before = greedy(fresh, target, 12)
    program.run_batch([{"i": i} for i in range(20)], backend=fresh)
    assert greedy(fresh, target, 12) == before

    def stored(scheduler: Any) -> list[Tokens]:
        paths = [[token for above in node.path() for token in above.tokens] for node in scheduler.tree.nodes()]
        return random.Random(0).sample(paths, min(20, len(paths)))

    paths = fresh._ask(stored)
    warm = [greedy(fresh, path, 4) for path in paths]
    for path, answer in zip(paths, warm, strict=True):
        fresh.reset_cache()
        assert greedy(fresh, path, 4) == answer


def test_100_many_that_arrive_together_compute_their_prefix_once(fresh: Engine) -> None:
    @function
    def program(s: State, i: int) -> None:
        s += "To be, or not to be, that is the question. " * 12
        schema = {"type": "object", "properties": {"k": {"const": f"m{i}"}}, "required": ["k"]}
        s += f"Number {i}: " + gen("x", json_schema={**schema, "additionalProperties": False}, max_tokens=40)

    states = program.run_batch([{"i": i} for i in range(16)], backend=fresh, num_threads=16)
    assert all(state["x"] == {"k": f"m{i}"} for i, state in enumerate(states))
    prompts = [completion_of(state).usage.prompt_tokens for state in states]
    shared = min(prompts) - 8
    assert shared > 100
    assert fresh.stats.computed_tokens < 2 * shared + 16 * 50
