"""A judge that branches, solves and merges: an essay is scored on each dimension side by side, then in all."""

from branchwise import Engine, State, function, select

ESSAYS = {
    "An apple a day": "Apples are good food. They have vitamins and fiber, they keep for weeks, and they cost little. "
    "A child can carry one to school. So an apple a day is a good habit.",
    "Stuff": "apples idk they are ok i guess. my dog is brown. apples apples",
}
DIMENSIONS = ["Clarity", "Grammar", "Focus"]
SCALE = [f" {score}" for score in range(1, 6)]
SHOWN = """A teacher scores short essays from 1 (poor) to 5 (very good).

Essay: the sea it is big. fish. i like when
Clarity: 1
Grammar: 1
Focus: 2
Verdict: weak

Essay: The sea covers most of the Earth. It feeds us, carries our ships, and keeps the climate mild. We must protect it.
Clarity: 5
Grammar: 5
Focus: 5
Verdict: strong

"""


@function
def judge(s: State, essay: str) -> dict[str, float]:
    s += SHOWN + f"Essay: {essay}\n"
    branches = s.fork(len(DIMENSIONS))  # branch
    branches += lambda i: f"{DIMENSIONS[i]}:" + select("score", SCALE)  # solve
    scores = []
    for dimension, branch in zip(DIMENSIONS, branches, strict=True):
        s += f"{dimension}:{branch['score']}\n"  # merge
        scores.append(int(branch["score"]))
    s += "Verdict:" + select("verdict", [" weak", " strong"], choices_method="unconditional_likelihood_normalized")
    return {**dict(zip(DIMENSIONS, scores, strict=True)), "Mean": sum(scores) / len(scores)}


def main(engine: Engine) -> None:
    before = engine.stats
    states = judge.run_batch([{"essay": essay} for essay in ESSAYS.values()], backend=engine)
    for title, state in zip(ESSAYS, states, strict=True):
        scores = ", ".join(f"{name} {score:.3g}" for name, score in state.ret_value.items())
        print(f"{title}: {scores};{state['verdict']}")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
