"""All examples, one after the other, on one engine: `python examples`."""

import time

import agent
import character
import chat
import dates
import extraction
import few_shot
import parallel_tips
import query
import self_consistency
import tool_call

from branchwise import Engine

EXAMPLES = [
    few_shot, parallel_tips, self_consistency, agent, chat, extraction, character, dates, query, tool_call,
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
