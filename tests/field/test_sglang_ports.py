"""What SGLang's own tests ask of its frontend language, asked of this one: programs in our words, under their names.

The import is all that a moved program changes, and the line that says where to run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import branchwise as sgl
from branchwise import Engine, State
from branchwise.interpreter import Completion


@pytest.fixture(scope="module")
def demo_engine(demo_model: Path) -> Iterator[Engine]:
    with Engine(demo_model, num_slots=8192, seed=0) as engine:
        yield engine
        engine.check()


@pytest.fixture
def demo(demo_engine: Engine) -> Iterator[Engine]:
    sgl.set_default_backend(demo_engine)
    yield demo_engine
    sgl.set_default_backend(None)


@pytest.fixture
def tiny(engine: Engine) -> Iterator[Engine]:
    sgl.set_default_backend(engine)
    yield engine
    sgl.set_default_backend(None)


def completion(state: State, name: str) -> Completion:
    result = state.meta(name)
    assert isinstance(result, Completion)
    return result


# -------------------------------------------------------------------------------------------------- few-shot QA


@sgl.function
def few_shot_qa(s: State, question: str) -> None:
    s += "Questions on geography, each with its answer.\n\n"
    for country, capital in (("Spain", "Madrid"), ("Norway", "Oslo"), ("Greece", "Athens")):
        s += f"Q: Which city is the capital of {country}?\nA: {capital}\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0)


@pytest.mark.slow
def test_few_shot_qa(demo: Engine) -> None:
    state = few_shot_qa.run(question="Which city is the capital of France?")
    assert state["answer"].strip() == "Paris"
    countries = {"Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo"}
    states = few_shot_qa.run_batch(
        [{"question": f"Which city is the capital of {country}?"} for country in countries], temperature=0.1
    )
    assert [state["answer"].strip() for state in states] == list(countries.values())
    before = demo.stats
    few_shot_qa.run_batch([{"question": f"Which city is the capital of {c}?"} for c in ("Cuba", "Peru", "Chile")])
    assert demo.stats.since(before).hit_tokens > 0.7 * demo.stats.since(before).prompt_tokens


# --------------------------------------------------------------------------------------------- a chat of two turns


def test_a_chat_in_both_ways_to_write_it(tiny: Engine) -> None:
    @sgl.function
    def interview(s: State, first: str, second: str) -> None:
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("answer_1", max_tokens=4))
        with s.user():
            s += second
        with s.assistant():
            s += sgl.gen("answer_2", max_tokens=4)

    state = interview.run(first="How deep is the river?", second="And now in one word.", temperature=0.7)
    messages = state.messages()
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[2]["content"], messages[4]["content"]] == [state["answer_1"], state["answer_2"]]


# --------------------------------------------------------------------------------------------------------- select


@sgl.function
def kind_of(s: State, word: str) -> None:
    s += "What kind of thing is it?\n"
    s += "Word: oak\nKind: tree\nWord: sparrow\nKind: bird\nWord: salmon\nKind: fish\n"
    s += "Word: " + word + "\n"
    s += "Kind:" + sgl.select("answer", [" tree", " bird", " fish"])


@pytest.mark.slow
def test_select(demo: Engine) -> None:
    for word, kind in {"eagle": " bird", "trout": " fish", "pine": " tree"}.items():
        state = kind_of.run(word=word)
        assert state["answer"] == kind
        assert state.text().endswith("Kind:" + kind)


# ---------------------------------------------------------------------------------------------- numbers and regex


@pytest.mark.slow
def test_decode_int(demo: Engine) -> None:
    @sgl.function
    def numbers(s: State) -> None:
        s += "The number of hours in a day is " + sgl.gen("hours", regex=r"[0-9]+\.") + "\n"
        s += "The number of days in a week is " + sgl.gen("days", regex=r"[0-9]+\.") + "\n"

    state = numbers.run(temperature=0)
    assert (state["hours"], state["days"]) == ("24.", "7.")


BYTE = "(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
IP = rf"({BYTE}\.){{3}}{BYTE}"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_regex(tiny: Engine, temperature: float) -> None:
    @sgl.function
    def address(s: State) -> None:
        s += "Q: What is the address of the server?\nA: " + sgl.gen("answer", temperature=temperature, regex=IP)

    for _ in range(4):
        assert re.fullmatch(IP, address.run()["answer"])


FACTS = r'\{"name": "[a-z ]{1,12}", "people": [1-9][0-9]{0,6}, "north": -?[0-9]{1,2}\.[0-9]\}'


def test_decode_json_by_regex(tiny: Engine) -> None:
    @sgl.function
    def city(s: State) -> None:
        s += "The facts about a city, as JSON:\n"
        s += sgl.gen("json", regex=FACTS)

    facts = ast.literal_eval(city.run(max_tokens=100)["json"])
    assert [type(facts[key]) for key in ("name", "people", "north")] == [str, int, float]


def test_dtype_gen(tiny: Engine) -> None:
    """Values of the types asked for, whatever the model says."""

    @sgl.function
    def program(s: State) -> None:
        for kind in (int, float, bool, str):
            s += f"a {kind.__name__}: "
            s += sgl.gen(kind.__name__, dtype=kind, max_tokens=12, on_truncate="close", temperature=0) + "\n"
        s += sgl.gen_int("n", max_tokens=4, on_truncate="close")
        s += sgl.gen_string("text", max_tokens=8, on_truncate="close")

    s = program.run()
    for kind in (int, float, bool, str):
        assert type(s[kind.__name__]) is kind
    assert type(s["n"]) is int
    assert type(s["text"]) is str


def test_decode_json(tiny: Engine) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer"}}}
    schema |= {"required": ["name", "age"], "additionalProperties": False}

    @sgl.function
    def program(s: State) -> None:
        s += "A person as JSON: "
        s += sgl.gen("person", json_schema=schema, max_tokens=24, on_truncate="close", temperature=0)

    person = program.run()["person"]
    assert set(person) == {"name", "age"}
    assert person["name"] in ("Ada", "Bob")



def test_gen_max_tokens(tiny: Engine) -> None:
    @sgl.function
    def program(s: State) -> None:
        s += "So: " + sgl.gen("x", max_tokens=7, ignore_eos=True) + sgl.gen("y", ignore_eos=True)

    state = program.run(max_tokens=3)
    assert completion(state, "x").usage.completion_tokens == 7
    assert completion(state, "y").usage.completion_tokens == 3
    assert completion(state, "x").finish_reason == "length"


def test_gen_min_tokens(tiny: Engine) -> None:
    @sgl.function
    def program(s: State, least: int, most: int) -> None:
        s += "So: " + sgl.gen("x", min_tokens=least, max_tokens=most)

    eos = dict.fromkeys(tiny.tokenizer.eos_ids, 100.0)  # the model would end at once
    for least, most in ((0, 16), (5, 16), (16, 16)):
        assert completion(program.run(least=least, most=most, logit_bias=eos), "x").usage.completion_tokens >= least
    assert completion(program.run(least=5, most=16, logit_bias=eos), "x").usage.completion_tokens <= 6


# ------------------------------------------------------------------------------------------- values used again


@pytest.mark.slow
def test_expert_answer(demo: Engine) -> None:
    @sgl.function
    def ask_an_expert(s: State, question: str) -> None:
        s += "Question: " + question + "\n"
        s += "A person who could tell us is" + sgl.gen("expert", stop=[".", "\n", ","], max_tokens=16) + ".\n"
        s += "Asked for the answer," + s["expert"] + " says: The capital of"
        s += sgl.gen("answer", stop=".", max_tokens=16) + "."

    state = ask_an_expert.run(question="Which city is the capital of France?", temperature=0)
    assert state.text().count(state["expert"]) >= 2
    assert "paris" in state.text().lower()


def calculate(expression: str) -> str:
    """Sums and products of whole numbers."""
    found = re.fullmatch(r"(\d+)([+*])(\d+)", expression)
    assert found, expression
    return str({"+": operator.add, "*": operator.mul}[found[2]](int(found[1]), int(found[3])))


@pytest.mark.slow
def test_tool_use(demo: Engine) -> None:
    @sgl.function
    def with_a_calculator(s: State, left: int, right: int) -> None:
        s += "Every sum is done by a calculator: calculate(expression).\n"
        s += "Q: What is 3 plus 4?\nA: calculate(3+4) = 7\nQ: What is 5 times 6?\nA: calculate(5*6) = 30\n"
        s += f"Q: What is {left} times {right}?\nA: calculate("
        s += sgl.gen("expression", regex=r"[0-9]+[+*][0-9]+\)") + " = "
        s["answer"] = calculate(s["expression"].removesuffix(")"))
        s += s["answer"]

    state = with_a_calculator.run(left=257, right=983, temperature=0)
    assert state["expression"] == "257*983)"
    assert int(state["answer"]) == 257 * 983
    assert state.text().endswith("calculate(257*983) = 252631")


@sgl.function
def react(s: State, question: str, look_up: Callable[[str], str]) -> None:
    s += "Question: In which country does the one live who wrote the book?\n"
    s += "Thought 1: I must find out who wrote it.\nAction 1: Search [author of the book].\nResult 1: Ada wrote it.\n"
    s += "Thought 2: So I must find out where Ada lives.\nAction 2: Search [where Ada lives].\nResult 2: In Chile.\n"
    s += "Thought 3: The country is Chile.\nAction 3: Finish [Chile].\n\n"
    s += "Question: " + question + "\n"
    for i in range(1, 5):
        s += f"Thought {i}:" + sgl.gen(f"thought_{i}", stop=[".", "\n"], max_tokens=24) + f".\nAction {i}: "
        s += sgl.select(f"action_{i}", ["Search", "Finish"])
        if s[f"action_{i}"] == "Finish":
            break
        s += " [" + sgl.gen(f"query_{i}", stop="]", max_tokens=16) + f"].\nResult {i}: "
        s += look_up(s[f"query_{i}"]) + "\n"
    s += " [" + sgl.gen("answer", stop=["]", "\n"], max_tokens=8) + "].\n"


def test_react_goes_as_the_model_says() -> None:
    backend = sgl.Scripted(
        {
            "thought_1": " I must look.",
            "action_1": "Search",
            "query_1": "the river]",
            "thought_2": " I know it",
            "action_2": "Finish",
            "answer": "12 feet]",
        }
    )
    asked: list[str] = []

    def look_up(query: str) -> str:
        asked.append(query)
        return "12 feet."

    state = react.run("How deep is it?", look_up, backend=backend)
    assert asked == ["the river"]
    assert state["answer"] == "12 feet"
    assert state.text().endswith("Action 2: Finish [12 feet].\n")
    ended = react.trace("How deep is it?", calculate).ended
    assert ended is not None
    assert ended.why == 'the value of select("action_1") was compared'


@pytest.mark.slow
def test_react(demo: Engine) -> None:
    state = react.run("In which country does the maker of the clock live?", lambda query: "In France.", temperature=0)
    assert state["action_1"] in ("Search", "Finish")
    assert state["answer"]


# ------------------------------------------------------------------------------------------------------ parallel


def test_parallel_decoding(tiny: Engine) -> None:
    @sgl.function
    def tips(s: State, topic: str, count: int) -> None:
        s += "USER: Tips for " + topic + ", please.\nASSISTANT: Here are " + str(count) + " short ones:\n"
        for i in range(1, 1 + count):
            s += f"{i}." + sgl.gen(f"tip_{i}", max_tokens=6, stop=[".", "\n"]) + ".\n"
        forks = s.fork(count)
        for i in range(count):
            forks[i] += f"Now tip {i + 1} at length:\nTip {i + 1}:"
            forks[i] += sgl.gen("detailed_tip", max_tokens=12, stop=["\n\n"])
        forks.join()
        s += "These tips at length:\n"
        for i in range(count):
            s += f"Tip {i + 1}:" + forks[i]["detailed_tip"] + "\n"
        s += "\nIn short," + sgl.gen("summary", max_tokens=8, ignore_eos=True)

    state = tips.run(topic="a good garden", count=4, temperature=0.3)
    assert isinstance(state["summary"], str)
    assert len(state["detailed_tip"]) == 4
    for i, tip in enumerate(state["detailed_tip"], start=1):
        assert f"Tip {i}:{tip}\n" in state.text()


def test_what_stands_for_parallel_encoding(tiny: Engine) -> None:
    """Texts that are read apart and put together are not what the model would have read; texts in order are."""

    @sgl.function
    def remember(s: State, question: str, statements: list[str]) -> None:
        s += "USER: Remember this.\n"
        forks = s.fork(len(statements))
        forks += lambda i: f"Statement {i}: " + statements[i] + " In short:" + sgl.gen("short", max_tokens=4)
        forks.join()
        for i, statement in enumerate(statements):
            s += f"Statement {i}: {statement} In short:" + forks[i]["short"] + "\n"
        s += "Question: " + question + "\nASSISTANT:" + sgl.gen("answer", max_tokens=8)

    statements = ["Ann is Lee's mother.", "Tom is Max's father.", "Eve is Joe's aunt."]
    state = remember.run(question="Who is the father of Max?", statements=statements, temperature=0)
    text = state.text()
    assert [text.index(statement) for statement in statements] == sorted(text.index(s) for s in statements)


@sgl.function
def tree_of_thought(s: State, problem: str, wide: int, deep: int) -> str:
    s += "Problem: " + problem + "\n"
    best = s
    for level in range(deep):
        proposals = best.fork(wide)
        proposals += f"Step {level + 1}:" + sgl.gen("step", max_tokens=6, stop="\n", temperature=1.0) + "\n"
        judges = [proposal.copy() for proposal in proposals]
        for judge in judges:
            judge += "Is this step sure, likely or impossible? It is" + sgl.select("worth", [" sure", " likely", " no"])
        order = [" no", " likely", " sure"]
        best = max(zip(judges, proposals, strict=True), key=lambda pair: order.index(pair[0]["worth"]))[1]
    best += "Answer:" + sgl.gen("answer", max_tokens=6, ignore_eos=True)
    return str(best["answer"]) + "|" + best.text()


def test_tree_of_thought(tiny: Engine) -> None:
    before = tiny.stats
    answer, _, text = tree_of_thought.run(problem="Make 24 of 1, 2, 3, 4.", wide=3, deep=2).ret_value.partition("|")
    assert answer
    assert re.fullmatch(r"Problem: .*\nStep 1:.*\nStep 2:.*\nAnswer:.*", text, re.DOTALL)
    done = tiny.stats.since(before)
    assert done.hit_tokens > 0.8 * done.prompt_tokens, "branches and judges share the thoughts before them"


def test_tree_of_thought_by_vote(tiny: Engine) -> None:
    @sgl.function
    def solve(s: State, problem: str, votes: int) -> str:
        s += "Problem: " + problem + "\n"
        plans = s.fork(3)
        plans += "Plan:" + sgl.gen("plan", max_tokens=6, stop="\n") + "\n"
        answers: Counter[str] = Counter()
        for plan in plans:
            several = plan.fork(votes)
            several += "Answer: " + sgl.gen("answer", regex="[0-9]{1,2}")
            several.join()
            answers.update(several["answer"])
        return answers.most_common(1)[0][0]

    assert solve.run(problem="6 * 7?", votes=3, seed=1).ret_value.isdigit()


def test_many_samples_are_forks(tiny: Engine) -> None:
    @sgl.function
    def several(s: State) -> None:
        s += "Tip:" + sgl.gen("tip", n=4, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)

    state = several.run()
    assert len(set(state["tip"])) > 1
    assert state.text() == "Tip:" + state["tip"][0]


# ------------------------------------------------------------------------------------------------------- running


def test_stream(tiny: Engine) -> None:
    @sgl.function
    def qa(s: State, question: str) -> None:
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, ignore_eos=True))

    state = qa.run(question="How deep is it?", stream=True)
    assert "".join(state.text_iter()) == state.text()
    state = qa.run(question="How deep is it?", stream=True)
    pieces = list(state.text_iter("answer"))
    assert len(pieces) > 2
    assert "".join(pieces) == state["answer"]


def test_run_batch_keeps_its_order_and_bound_arguments(tiny: Engine) -> None:
    @sgl.function
    def sums(s: State, a: int, b: int, style: str) -> None:
        s += f"{style}: {a} + {b} = " + sgl.gen("sum", regex="[0-9]{1,3}")

    bound = sums.bind(style="briefly")
    states = bound.run_batch([{"a": a, "b": 1} for a in range(20)], num_threads=8, progress_bar=False)
    assert [state.text().partition(" = ")[0] for state in states] == [f"briefly: {a} + 1" for a in range(20)]
    assert sums.run(a=1, b=2, style="so").text().startswith("so: 1 + 2")


PAIRS = [
    ("To open the door, she", [" turned the key.", " ate the window.", " painted the soup.", " sang the wall."]),
    ("He was thirsty, so he", [" drank some water.", " drank some sand.", " drove a mountain.", " slept a chair."]),
    ("It rained, so they", [" opened their umbrellas.", " opened their fish.", " dried the rain.", " ate a cloud."]),
    ("The cat saw a mouse and", [" ran after it.", " wrote a novel.", " paid the bill.", " melted the road."]),
    ("At night the sky is full of", [" stars.", " forks.", " carpets.", " spoons of bread."]),
    ("She put the letter in an", [" envelope.", " elephant.", " argument.", " ocean of soup."]),
    ("The baker took the bread out of the", [" oven.", " river.", " letter.", " moonlight."]),
    ("To see better, he put on his", [" glasses.", " sandwich.", " piano.", " staircase."]),
]


@pytest.mark.slow
def test_hellaswag_select(demo: Engine) -> None:
    """How often the likeliest ending is the sensible one: few shots, then a beginning, four endings."""
    shots = "".join(beginning + endings[0] + "\n\n" for beginning, endings in PAIRS[:2])

    @sgl.function
    def ending(s: State, beginning: str, endings: list[str]) -> None:
        s += shots + beginning
        s += sgl.select("ending", endings)

    batch: list[dict[str, Any]] = [{"beginning": b, "endings": [*e[2:], *e[:2]]} for b, e in PAIRS[2:]]
    states = ending.run_batch(batch, num_threads=16)
    right = sum(state["ending"] == endings[0] for state, (_, endings) in zip(states, PAIRS[2:], strict=True))
    assert right >= 5, f"{right} of {len(batch)}"
