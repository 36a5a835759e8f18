"""A chat that can be rewound: each turn is a fork of the one before, so going back costs nothing."""

from branchwise import Engine, State, assistant, function, gen, system, user


@function(temperature=0, max_tokens=40, stop="\n")
def conversation(s: State) -> list[str]:
    s += system("You are a helpful assistant. Answer in one short sentence.")
    turns = [s]

    def ask(question: str) -> str:
        turn = turns[-1].copy()
        turn += user(question) + assistant(gen("answer"))
        turns.append(turn)
        return f"user: {question}\nassistant: {turn['answer']}"

    told = [ask("What is the capital of France?"), ask("Which river flows through it?")]
    turns.pop()  # take the last turn back: the state before it is still there, and in the cache
    told.append("(rewound by one turn)")
    told.append(ask("Which language do people speak there?"))
    return told


def main(engine: Engine) -> None:
    before = engine.stats
    print(*conversation.run(backend=engine).ret_value, sep="\n")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
