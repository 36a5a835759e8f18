"""Self-consistency: eight ways to reason over one problem, and a vote on where they end."""

import re
from collections import Counter

from branchwise import Engine, State, function, gen

WORKED = """Question: Ann has 3 apples and buys 2 more. How many apples does she have?
Reasoning: Ann starts with 3 apples. She buys 2 more. 3 + 2 = 5. The answer is 5.

Question: A box holds 4 pens. How many pens are in 3 boxes?
Reasoning: One box holds 4 pens. There are 3 boxes. 4 * 3 = 12. The answer is 12.

Question: Tom had 10 coins and lost 4. How many coins are left?
Reasoning: Tom had 10 coins. He lost 4. 10 - 4 = 6. The answer is 6.

"""


@function
def solve(s: State, question: str) -> str | None:
    s += WORKED + f"Question: {question}\nReasoning:"
    s += gen("reasoning", n=8, temperature=0.7, seed=1, max_tokens=36, stop="\n")
    return vote(s["reasoning"])


def vote(reasonings: list[str]) -> str | None:
    """The answer that most of them end with."""
    answers = [found[-1] for text in reasonings if (found := re.findall(r"The answer is (\d+)", text))]
    return Counter(answers).most_common(1)[0][0] if answers else None


def main(engine: Engine) -> None:
    before = engine.stats
    question = "A bag holds 5 oranges. How many oranges are in 4 bags?"
    state = solve.run(question=question, backend=engine)
    print(question)
    for reasoning in state["reasoning"]:
        print(f"  {reasoning.strip()}")
    print(f"The vote: {state.ret_value}")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
