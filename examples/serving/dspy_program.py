"""A DSPy program on `branchwise serve smollm2-135m`: the instructions it repeats are computed once. Needs `dspy`.

    python examples/serving/dspy_program.py http://127.0.0.1:8000/v1
"""

import sys

import dspy

FACTS = ["The Seine runs through Paris.", "The Thames runs through London.", "The Tiber runs through Rome."]


class River(dspy.Signature):
    """Name the river in the sentence."""

    sentence: str = dspy.InputField()
    river: str = dspy.OutputField()


def main(url: str) -> None:
    lm = dspy.LM("openai/smollm2-135m", api_base=url, api_key="none", temperature=0, max_tokens=100, cache=False)
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        ask = dspy.Predict(River)
        ask.demos = [dspy.Example(sentence="The Danube runs through Vienna.", river="Danube")]
        for fact in FACTS:
            print(ask(sentence=fact).river)
    usages = [call["usage"] for call in lm.history]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    print(f"{cached} of {sum(usage['prompt_tokens'] for usage in usages)} prompt tokens were cached")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
