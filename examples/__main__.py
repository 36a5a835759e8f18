"""All examples, one after the other, on one engine: `python examples`."""

import time

import agent
import chat
import few_shot
import parallel_tips
import self_consistency

from branchwise import Engine

EXAMPLES = [few_shot, parallel_tips, self_consistency, agent, chat]


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
