"""A ReAct agent: the model thinks and picks a tool, Python runs it, and what was said before is a prefix hit."""

# After Yao et al. 2022, "ReAct: Synergizing Reasoning and Acting in Language Models".

import re
from pathlib import Path

from branchwise import Engine, State, function, gen, select

BOOK = (Path(__file__).parent / "texts" / "alice.txt").read_text(encoding="utf-8").partition("\n\n")[2]
SHOWN = """Answer questions with a calculator and a search in a book.

Question: How much is 12 plus 30?
Thought: I must add 12 and 30.
Action: calculate 12 + 30
Result: 42
Thought: I know the answer.
Action: answer 42

Question: Who is Dinah?
Thought: I must search for Dinah.
Action: search Dinah
Result: (Dinah was the cat.)
Thought: I know the answer.
Action: answer the cat

Question: How much is 7 times 8?
Thought: I must multiply 7 and 8.
Action: calculate 7 * 8
Result: 56
Thought: I know the answer.
Action: answer 56

"""
QUESTIONS = ["How much is 45 plus 87?", "Who is the White Rabbit?", "How much is 12 times 12?"]
MOST_STEPS = 4

def calculate(expression: str) -> str:
    left, sign, right = expression.split()
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


def search(word: str) -> str:
    """The words around the first place in the book."""
    found = re.search(rf"[^.,?!\"\n]*{re.escape(word.removeprefix('the '))}[^.,?!\"\n]*", BOOK, re.IGNORECASE)
    return found[0].strip() if found else "nothing was found"


@function(temperature=0, stop="\n")
def agent(s: State, question: str) -> str | None:
    s += SHOWN + f"Question: {question}\n"
    for _ in range(MOST_STEPS):
        s += "Thought:" + gen("thought", max_tokens=16) + "\nAction:"
        s += select("tool", [" calculate", " search", " answer"])
        match s["tool"]:
            case " calculate":
                s += " " + gen("call", regex=r"[1-9][0-9]{0,3} [-+*] [1-9][0-9]{0,3}", max_tokens=12)
                s += f"\nResult: {calculate(s['call'])}\n"
            case " search":
                s += gen("word", max_tokens=8)
                s += f"\nResult: {search(s['word'].strip())}\n"
            case " answer":
                s += gen("answer", max_tokens=16)
                return s["answer"].strip()
    return None


def main(engine: Engine) -> None:
    before = engine.stats
    for question in QUESTIONS:
        state = agent.run(question, backend=engine)
        print(state.text().removeprefix(SHOWN), end="\n\n")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
