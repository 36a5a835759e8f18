"""Fork and join: three points of an answer are written side by side, over one copy of what comes before."""

from branchwise import Engine, State, function, gen, system, user

BEGINNINGS = ["Eat", "Keep your bedroom", "Exercise"]


@function(temperature=0, max_tokens=36)
def advice(s: State) -> None:
    s += system("You are a helpful assistant.")
    s += user("How can I sleep better?")
    with s.assistant():
        s += "To sleep better, follow these tips:\n"
        branches = s.fork(len(BEGINNINGS))
        branches += lambda i: f"\n{i + 1}. {BEGINNINGS[i]}" + gen("tip", stop=["\n", "."])
        branches.join()
        for i, (beginning, tip) in enumerate(zip(BEGINNINGS, s["tip"], strict=True), 1):
            s += f"\n{i}. {beginning}{tip}."
        s += "\n\nThe most important of these is to" + gen("advice", stop=["\n", "."]) + "."


def main(engine: Engine) -> None:
    before = engine.stats
    state = advice.run(backend=engine)
    print(state.messages()[-1]["content"])
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
