"""Programs in SGLang's own frontend against the server at the URL that is given; prints what they said, as JSON."""

import json
import sys
from typing import Any

import sglang as sgl


@sgl.function
def asked(s: Any, question: str) -> None:
    s += "Question: " + question + "\nAnswer:"
    s += sgl.gen("answer", max_tokens=8, temperature=0, stop="\n")


@sgl.function
def chosen(s: Any, method: Any) -> None:
    s += "The old mill is by the"
    s += sgl.select("place", choices=[" river", " sea and the harbour", " hill"], choices_method=method)
    s += "."


@sgl.function
def branched(s: Any) -> None:
    s += "Two tips for a good night. "
    forks = s.fork(2)
    for number, branch in enumerate(forks):
        branch += f"Tip {number + 1}: " + sgl.gen("tip", max_tokens=6, temperature=0)
    forks.join()
    s += "".join(branch["tip"] for branch in forks)
    s += sgl.gen("end", max_tokens=4, temperature=0)


@sgl.function
def typed(s: Any) -> None:
    s += "The number is " + sgl.gen("number", max_tokens=6, regex="[0-9]{2,4}", temperature=0)
    s += " and the truth is " + sgl.gen("truth", dtype=bool, max_tokens=6, temperature=0)


@sgl.function
def schemed(s: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    s += "JSON: " + sgl.gen("value", max_tokens=40, json_schema=json.dumps(schema), temperature=0)


@sgl.function
def talked(s: Any) -> None:
    s += sgl.system("Be brief.") + sgl.user("Hello.") + sgl.assistant(sgl.gen("said", max_tokens=6, temperature=0))


@sgl.function
def scored(s: Any) -> None:
    s += "The old mill" + sgl.gen(
        "more", max_tokens=3, temperature=0, return_logprob=True, logprob_start_len=0, top_logprobs_num=2,
        return_text_in_logprobs=True,
    )  # fmt: skip


def main(url: str) -> None:
    backend = sgl.RuntimeEndpoint(url)
    sgl.set_default_backend(backend)
    told: dict[str, Any] = {"answer": asked.run(question="What is a mill?")["answer"]}
    methods = [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]
    told["places"] = [chosen.run(method=method)["place"] for method in methods]
    state = branched.run()
    told["branched"] = state.text()
    told["end"] = state["end"]
    state = typed.run()
    told["number"], told["truth"] = state["number"], state["truth"]
    told["value"] = schemed.run()["value"]
    told["said"] = talked.run()["said"]
    streamed = asked.run(question="What is a mill?", stream=True)
    told["pieces"] = list(streamed.text_iter("answer"))
    batch = asked.run_batch([{"question": f"What is {n}?"} for n in range(8)], num_threads=4)
    told["batch"] = [state["answer"] for state in batch]
    told["meta"] = scored.run().get_meta_info("more")
    told["info"] = sgl.get_server_info(backend)
    sgl.flush_cache(backend)
    backend.cache_prefix("The old mill is by the")
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
