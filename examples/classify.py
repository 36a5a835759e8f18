"""Few-shot classification of a novel's lines; what the model says of no line at all is its bias, and taken off."""

# The correction is contextual calibration (Zhao et al. 2021, "Calibrate Before Use").

from pathlib import Path

from branchwise import Engine, State, function, select

NOVEL = Path(__file__).parent / "texts" / "pride_and_prejudice.txt"
KINDS = ["speech", "narration"]
SHOWN = """Line: "Where have you been?" asked Tom.
Does somebody speak? yes
Line: She closed the door and went upstairs.
Does somebody speak? no
Line: "I was in the garden, my dear."
Does somebody speak? yes
Line: Nobody went out for a while.
Does somebody speak? no
"""
NO_LINES = ["N/A", ""]


@function
def classify(s: State, line: str) -> tuple[float, ...]:
    s += SHOWN + f"Line: {line}\nDoes somebody speak?" + select("speaks", [" yes", " no"])
    return s.meta("speaks").scores


def main(engine: Engine) -> None:
    before = engine.stats
    lines = [line.strip() for line in NOVEL.read_text(encoding="utf-8").split("\n\n")[1:]]
    states = classify.run_batch([{"line": line} for line in [*NO_LINES, *lines]], backend=engine)
    margins = [yes - no for yes, no in (state.ret_value for state in states)]
    bias = sum(margins[: len(NO_LINES)]) / len(NO_LINES)
    found = [KINDS[margin < bias] for margin in margins[len(NO_LINES) :]]
    for line, kind in zip(lines, found, strict=True):
        print(f"{kind:11}{line[:80]}")
    right = sum(kind == KINDS['"' not in line] for line, kind in zip(lines, found, strict=True))
    print(f"{right} of {len(lines)} are right")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
