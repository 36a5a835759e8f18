"""A conversation of several turns: each turn computes its own tokens, never the history again."""

from branchwise import Engine, State, assistant, function, gen, system, user

TURNS = [
    "What is the capital of France?",
    "What is that city famous for?",
    "Which language do people speak there?",
]


@function(temperature=0, max_tokens=40)
def conversation(s: State, turns: list[str]) -> None:
    s += system("You are a helpful assistant. Answer in one short sentence.")
    for number, turn in enumerate(turns):
        s += user(turn)
        s += assistant(gen(f"answer {number}", stop="\n"))


def main(engine: Engine) -> None:
    before = engine.stats
    state = conversation.run(turns=TURNS, backend=engine)
    for message in state.messages()[1:]:
        print(f"{message['role']}: {message['content']}")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
