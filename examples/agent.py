"""An agent: the model writes calls of a tool, Python runs them, and what comes back is a prefix hit already."""

from branchwise import Engine, State, function, gen, select

SHOWN = """Answer questions about sums with a calculator.

Question: How much is 12 plus 30?
Step: calculate 12 + 30
Result: 42
Step: answer
Answer: 12 plus 30 is 42.

Question: How much is 7 times 8?
Step: calculate 7 * 8
Result: 56
Step: answer
Answer: 7 times 8 is 56.

Question: How much is 90 minus 15?
Step: calculate 90 - 15
Result: 75
Step: answer
Answer: 90 minus 15 is 75.

"""
MOST_STEPS = 3


def calculate(expression: str) -> int:
    """The tool: two numbers and a sign."""
    left, sign, right = expression.split()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


@function(temperature=0)
def agent(s: State, question: str) -> None:
    s += SHOWN + f"Question: {question}\n"
    for _ in range(MOST_STEPS):
        s += "Step:" + select("step", [" calculate", " answer"])
        if s["step"] == " answer":
            break
        s += " " + gen("call", regex=r"[1-9][0-9]{0,3} [-+*] [1-9][0-9]{0,3}", max_tokens=12)
        s += f"\nResult: {calculate(s['call'])}\n"
    s += "\nAnswer:" + gen("answer", max_tokens=24, stop="\n")


def main(engine: Engine) -> None:
    before = engine.stats
    state = agent.run(question="How much is 45 plus 87?", backend=engine)
    print(state.text().removeprefix(SHOWN))
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
