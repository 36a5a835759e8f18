"""A sheet that compares prompts: the same inputs under several prompts, one column each, and how many are right."""

from branchwise import Engine, State, function, gen

PROMPTS = {
    "bare": "{word}:",
    "asked": "Question: What is the opposite of {word}?\nAnswer: The opposite of {word} is",
    "shown": "The opposite of big is small.\nThe opposite of early is late.\nThe opposite of {word} is",
}
OPPOSITES = {"hot": "cold", "happy": "sad", "up": "down", "day": "night", "open": "closed"}


@function(temperature=0, max_tokens=4)
def opposite(s: State, prompt: str, word: str) -> str:
    s += prompt.format(word=word) + gen("answer", stop=["\n", ".", ","])
    return s["answer"].strip()


def main(engine: Engine) -> None:
    before = engine.stats
    batch = [{"prompt": prompt, "word": word} for prompt in PROMPTS.values() for word in OPPOSITES]
    answers = [state.ret_value for state in opposite.run_batch(batch, backend=engine)]
    columns = [answers[i : i + len(OPPOSITES)] for i in range(0, len(answers), len(OPPOSITES))]
    print("".join(f"{title:26}" for title in ("", *PROMPTS)).rstrip())
    for word, *row in zip(OPPOSITES, *columns, strict=True):
        print("".join(f"{cell:26}" for cell in (word, *row)).rstrip())
    wanted = list(OPPOSITES.values())
    right = [sum(o in answer for o, answer in zip(wanted, column, strict=True)) for column in columns]
    print("".join(f"{cell!s:26}" for cell in ("right", *right)).rstrip())
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
