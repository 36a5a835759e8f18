"""Skeleton of thought: first the points of an answer, then each of them is written out, all at the same time."""

from branchwise import Engine, State, function, gen, system, user

QUESTION = "How do I stay healthy?"


@function(temperature=0)
def answer(s: State, question: str) -> list[tuple[str, str]]:
    s += system("You are a helpful assistant. You answer in short points.")
    s += user(question)
    with s.assistant():
        s += "The four most important points:\n"
        for number in range(1, 5):
            s += f"{number}. " + gen(f"point {number}", stop=["\n", ".", ",", ":"], max_tokens=8) + "\n"
        points = [s[f"point {number}"] for number in range(1, 5)]
        branches = s.fork(len(points))
        branches += lambda i: f"\n{points[i]} in one sentence: You" + gen("more", stop=["\n", "."], max_tokens=30)
        return [(point, f"You{branch['more']}.") for point, branch in zip(points, branches, strict=True)]


def main(engine: Engine) -> None:
    before = engine.stats
    print(QUESTION)
    for number, (point, more) in enumerate(answer.run(QUESTION, backend=engine).ret_value, 1):
        print(f"{number}. {point}: {more}")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
