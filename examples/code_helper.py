"""A coding helper whose requests branch at three levels: the repository, a file in it, a question about that file."""

from branchwise import Engine, State, function, gen

REPOSITORY = """# A small Python project.
# geometry.py: areas of shapes
# words.py: words in a text

"""
FILES = {
    "geometry.py": """def square(side):
    return side * side

def rectangle(width, height):
    return width * height
""",
    "words.py": """def words(text):
    return text.split()

def longest(text):
    return max(words(text), key=len)
""",
}
WANTED = {
    "geometry.py": ["triangle(base, height)", "cube(side)"],
    "words.py": ["shortest(text)", "count(text)"],
}


@function(temperature=0, max_tokens=20, stop="\n")
def help_with(s: State) -> list[str]:
    s += REPOSITORY
    questions = list[tuple[str, State]]()
    files = s.fork(len(FILES))
    for file, (name, source) in zip(files, FILES.items(), strict=True):
        file += f"# {name}\n{source}\n"
        branches = file.fork(len(WANTED[name]))
        for branch, wanted in zip(branches, WANTED[name], strict=True):
            branch += f"def {wanted}:\n    return" + gen("body")
            questions.append((f"{name}: def {wanted}:", branch))
    return [f"{asked}\n    return{branch['body']}" for asked, branch in questions]


def main(engine: Engine) -> None:
    before = engine.stats
    print(*help_with.run(backend=engine).ret_value, sep="\n")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
