"""A client of `branchwise serve` by the openai package: a stream, an object of a schema, a call of a tool.

    branchwise serve smollm2-135m &
    python examples/serving/client.py http://127.0.0.1:8000/v1
"""

import json
import sys

from openai import OpenAI

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id

    stream = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
    )
    print("".join(chunk.choices[0].text for chunk in stream if chunk.choices))

    said = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "I live in Rome, in Italy. Where do I live? Answer as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}},
        temperature=0,
        max_tokens=60,
    )
    print(json.loads(said.choices[0].message.content or ""))

    answers = [
        client.completions.create(
            model=model, prompt="Is Rome in Italy? Answer:", max_tokens=5, extra_body={"choices": [" yes", " no"]}
        )
        for _ in range(2)
    ]
    details = answers[1].usage.prompt_tokens_details if answers[1].usage else None
    print(answers[0].choices[0].text, "- found in the cache the second time:", details and details.cached_tokens)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
