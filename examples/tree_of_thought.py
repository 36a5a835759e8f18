"""Tree of thought with a checker: the model proposes the next step of each path, Python checks it, the best go on."""

from branchwise import Engine, State, function, gen

START, TARGET, WIDTH, DEPTH = 3, 26, 3, 5
SHOWN = """Start at a number and reach the target. A step is "double" or "add" with a number from 1 to 5.

From 2 to 9:
2 double = 4
4 double = 8
8 add 1 = 9

From 5 to 23:
5 double = 10
10 double = 20
20 add 3 = 23

"""


def checked(number: int, move: str) -> int:
    """Where a move really leads, whatever the model would have written behind it."""
    return number * 2 if move == "double" else number + int(move.removeprefix("add "))


@function
def search(s: State) -> list[str] | None:
    s += SHOWN + f"From {START} to {TARGET}:\n"
    paths: list[tuple[int, State, list[str]]] = [(START, s, [])]
    for depth in range(DEPTH):
        grown: dict[int, tuple[int, State, list[str]]] = {}
        for number, state, steps in paths:
            branches = state.fork(4)
            branches += f"{number} " + gen("move", regex=r"double|add [1-5]", temperature=1.2, seed=depth)
            for branch in branches:
                result = checked(number, branch["move"])
                branch += f" = {result}\n"
                if result <= TARGET and result not in grown:  # the checker prunes
                    grown[result] = (result, branch, [*steps, f"{number} {branch['move']} = {result}"])
        paths = sorted(grown.values(), key=lambda path: TARGET - path[0])[:WIDTH]
        if paths and paths[0][0] == TARGET:
            return paths[0][2]
    return None


def main(engine: Engine) -> None:
    before = engine.stats
    steps = search.run(backend=engine).ret_value
    print(f"From {START} to {TARGET}:", *(steps or ["no path was found"]), sep="\n  ")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
