"""A character sheet as a dataclass: enums, numbers and a list, and a second one that knows the first."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from branchwise import Engine, State, function, gen


class House(Enum):
    GRYFFINDOR = "Gryffindor"
    HUFFLEPUFF = "Hufflepuff"
    RAVENCLAW = "Ravenclaw"
    SLYTHERIN = "Slytherin"


@dataclass
class Wand:
    wood: Literal["oak", "holly", "willow"]
    length_in_inches: float


@dataclass
class Character:
    name: str
    house: House
    age: int
    alive: bool
    wand: Wand


INTRODUCTION = "Characters of the Harry Potter novels, as JSON.\n\n"


@function
def sheets(s: State, names: list[str]) -> list[Character]:
    s += INTRODUCTION
    branches = s.fork(len(names))
    for branch, name in zip(branches, names, strict=True):
        branch += f"{name}: " + gen("character", json_schema=Character, temperature=0, max_tokens=90)
    return [branch["character"] for branch in branches]


def main(engine: Engine) -> None:
    before = engine.stats
    for names in (["Hermione Granger"], ["Harry Potter", "Hermione Granger", "Ron Weasley"]):
        for found in sheets.run(names, backend=engine).ret_value:
            print(f"{found.name}: {found.house.name}, {found.age}, {found.wand.wood}")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
