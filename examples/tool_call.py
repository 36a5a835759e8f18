"""A tool call with typed arguments: the model picks one of two tools, and Python calls it with what it wrote."""

from dataclasses import dataclass
from typing import Literal

from branchwise import Engine, State, function, gen


@dataclass
class Calculate:
    tool: Literal["calculate"]
    left: int
    operator: Literal["+", "-", "*"]
    right: int

    def call(self) -> str:
        results = {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}
        return str(results[self.operator])


@dataclass
class Look:
    tool: Literal["look_up"]
    country: str

    def call(self) -> str:
        return {"France": "Paris", "Italy": "Rome"}.get(self.country, "unknown")


WORKED = """Question: What is 7 minus 2?
Call: {"tool": "calculate", "left": 7, "operator": "-", "right": 2}
Result: 5
Question: What is the capital of Italy?
Call: {"tool": "look_up", "country": "Italy"}
Result: Rome
Question: What is 12 plus 30?
Call: {"tool": "calculate", "left": 12, "operator": "+", "right": 30}
Result: 42
"""


@function
def answer(s: State, question: str) -> str:
    s += WORKED + f"Question: {question}\nCall: "
    s += gen("call", json_schema=Calculate | Look, temperature=0, max_tokens=50)
    result: str = s["call"].call()
    s += f"\nResult: {result}\n"
    return result


def main(engine: Engine) -> None:
    before = engine.stats
    for question in ("What is the capital of France?", "What is 17 plus 25?"):
        state = answer.run(question, backend=engine)
        print(f"{question} {state['call']} -> {state.ret_value}")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
