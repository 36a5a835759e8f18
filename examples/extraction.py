"""A Pydantic object extracted from each of several texts; the instructions before them are computed once."""

from pydantic import BaseModel

from branchwise import Engine, State, function, gen


class Person(BaseModel):
    name: str
    born: int
    profession: str


WORKED = """Text: Ada Lovelace, born in 1815, was a mathematician.
JSON: {"name": "Ada Lovelace", "born": 1815, "profession": "mathematician"}

Text: The painter Frida Kahlo was born in 1907.
JSON: {"name": "Frida Kahlo", "born": 1907, "profession": "painter"}

"""
TEXTS = [
    "Marie Curie was a physicist. She was born in 1867 in Warsaw.",
    "In 1879 the physicist Albert Einstein was born.",
    "The novelist Jane Austen, born in 1775, wrote six novels.",
]


@function
def extract(s: State, text: str) -> Person:
    s += WORKED + f"Text: {text}\nJSON: " + gen("person", json_schema=Person, temperature=0, max_tokens=60)
    return s["person"]  # a Person, not its JSON


def main(engine: Engine) -> None:
    before = engine.stats
    for state in extract.run_batch([{"text": text} for text in TEXTS], backend=engine):
        person = state.ret_value
        print(f"{person.name}, {person.profession}, {person.born}")
    spent = engine.stats.since(before)
    print(f"{spent.forced_tokens} of {spent.generated_tokens} tokens were forced")
    print(spent.hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
