"""Few-shot questions: one prefix of examples, computed once for a whole list of questions."""

from branchwise import Engine, State, function, gen

EXAMPLES = """Answer each question with one or two words.

Q: What is the capital of Portugal?
A: Lisbon

Q: What is the chemical symbol of gold?
A: Au

Q: Which planet is known as the red planet?
A: Mars

Q: Who wrote Romeo and Juliet?
A: William Shakespeare

Q: What is the largest ocean?
A: The Pacific

"""

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is the capital of Italy?",
    "What is the chemical symbol of oxygen?",
    "What is the chemical symbol of silver?",
    "Which planet is closest to the sun?",
    "Which planet has the most famous rings?",
    "Who wrote Hamlet?",
    "Who painted the Mona Lisa?",
    "What is the largest animal on Earth?",
    "What is the longest river in Africa?",
    "What is the highest mountain on Earth?",
]


@function(temperature=0, max_tokens=8, stop="\n")
def answer(s: State, question: str) -> None:
    s += EXAMPLES
    s += f"Q: {question}\nA:" + gen("answer")


def main(engine: Engine) -> None:
    before = engine.stats
    states = answer.run_batch([{"question": question} for question in QUESTIONS], backend=engine)
    for question, state in zip(QUESTIONS, states, strict=True):
        print(f"{question:42}{state['answer']}")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
