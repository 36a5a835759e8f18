"""Answers from a folder of texts: the best passage is found by its words, and questions about it share its tokens."""

import math
import re
from collections import Counter
from pathlib import Path

from branchwise import Engine, State, function, gen

FOLDER = Path(__file__).parent / "texts"
SHOWN = """Answer each question from the passage, in a few words.

Passage: Tom painted the fence white on Saturday. His aunt Polly gave him an apple.
Question: What color is the fence?
Answer: white
Question: What did Tom get?
Answer: an apple

"""
QUESTIONS = [
    "What color are the eyes of the White Rabbit?",
    "What animal is Dinah?",
    "Which month is it in my soul?",
    "What is the name of the man without money in his purse?",
    "What did Alice fall down?",
    "What was the rabbit-hole like?",
]


def passages(folder: Path) -> list[str]:
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))]
    return [passage.strip() for text in texts for passage in text.split("\n\n")[1:]]


def best(question: str, among: list[str]) -> str:
    """The passage that shares most words with the question, rare ones counting more."""
    words = [set(re.findall(r"\w+", passage.lower())) for passage in among]
    spread = Counter(word for own in words for word in own)
    asked = set(re.findall(r"\w+", question.lower()))
    rarity = [sum(math.log(len(among) / spread[word]) for word in asked & own) for own in words]
    return among[rarity.index(max(rarity))]


@function(temperature=0, max_tokens=16, stop="\n")
def answer(s: State, passage: str, question: str) -> None:
    s += SHOWN + f"Passage: {passage}\nQuestion: {question}\nAnswer:" + gen("answer")


def main(engine: Engine) -> None:
    before, texts = engine.stats, passages(FOLDER)
    batch = [{"passage": best(question, texts), "question": question} for question in QUESTIONS]
    for item, state in zip(batch, answer.run_batch(batch, backend=engine), strict=True):
        print(f"{item['question']}\n  {state['answer'].strip()}   (from: {item['passage'][:48]}...)")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
