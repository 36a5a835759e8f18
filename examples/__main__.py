"""All examples, one after the other, on one engine: `python examples`."""

import time

import agent
import character
import chat
import classify
import code_helper
import compare_prompts
import dates
import extraction
import few_shot
import generative_agents
import judge
import parallel_tips
import query
import rag
import rewind
import self_consistency
import skeleton
import tool_call
import tree_of_thought

from branchwise import Engine

EXAMPLES = [
    few_shot, classify, compare_prompts, parallel_tips, skeleton, self_consistency, tree_of_thought, judge, agent,
    tool_call, rag, code_helper, generative_agents, chat, rewind, extraction, character, dates, query,
]  # fmt: skip


def main() -> None:
    with Engine("smollm2-135m") as engine:
        print(engine)
        for example in EXAMPLES:
            print(f"\n--- {example.__name__}: {(example.__doc__ or '').strip()}\n")
            start = time.perf_counter()
            example.main(engine)
            print(f"{time.perf_counter() - start:.1f} s")
        print(f"\n{engine.stats}")


if __name__ == "__main__":
    main()
