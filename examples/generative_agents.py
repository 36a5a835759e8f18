"""Generative agents: three people of one village; each hour all of them act at once, and remember what they saw."""

from branchwise import Engine, State, function, gen, select

VILLAGE = """A village has a bakery, a school and a garden. In the morning people work, at noon they eat, in the evening
they rest.

"""
PEOPLE = {
    "Ann": "Ann is the baker. She bakes bread in the bakery.",
    "Ben": "Ben is the teacher. He teaches children in the school.",
    "Cleo": "Cleo is the gardener. She grows roses in the garden.",
}
PLACES = ["bakery", "school", "garden"]
HOURS = ["In the morning", "At noon", "In the evening"]


@function(temperature=0.5, seed=7, max_tokens=12)
def day(s: State) -> list[str]:
    s += VILLAGE
    minds = s.fork(len(PEOPLE))
    minds += lambda i: list(PEOPLE.values())[i] + "\n"
    diary = []
    for hour in HOURS:
        for mind, name in zip(minds, PEOPLE, strict=True):
            mind += f"{hour}, {name} is in the " + select("place", PLACES) + " to" + gen("act", stop=["\n", ".", ","])
            mind += ".\n"
        where = {name: mind["place"] for mind, name in zip(minds, PEOPLE, strict=True)}
        for mind, name in zip(minds, PEOPLE, strict=True):
            diary.append(f"{hour}, {name} is in the {where[name]} to{mind['act']}.")
            met = [other for other in PEOPLE if other != name and where[other] == where[name]]
            mind += f"{name} meets {' and '.join(met)}.\n" if met else ""
    return diary


def main(engine: Engine) -> None:
    before = engine.stats
    print(*day.run(backend=engine).ret_value, sep="\n")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
