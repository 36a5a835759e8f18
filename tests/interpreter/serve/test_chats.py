"""`/v1/chat/completions`: turns, streams, tools; with the official client, and with our own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from branchwise import State, assistant, function, gen, select, user
from branchwise.interpreter.serve import chats
from branchwise.interpreter.serve.asking import Caller
from branchwise.interpreter.serve.bodies import ChatBody, Message, Tool
from branchwise.interpreter.serve.chats import Turn
from branchwise.interpreter.serve.job import Piece
from branchwise.interpreter.serve.toolcalls import form_of

from .live import Live, live

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Write <tool_call>, a call as JSON, </tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "maximum": 7, "minimum": 1},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
HELLO = [{"role": "user", "content": "How deep?"}]


@pytest.fixture(scope="module")
def with_tools(
    tiny_model: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """A model whose template knows tools."""
    folder = tmp_path_factory.mktemp("tools")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    with live(folder, num_slots=4096, seed=0) as server:
        yield server


def create(served: Live, **fields: Any) -> Any:
    fields = {"messages": HELLO, "temperature": 0, "max_tokens": 8, "model": served.engine.name, **fields}
    return served.client().chat.completions.create(**fields)


def test_a_turn_is_what_a_program_would_get(served: Live) -> None:
    def program(s: State) -> None:
        s.user("How deep?")
        s += assistant(gen("x", max_tokens=8, temperature=0, return_logprob=True, top_logprobs=2))

    state = function(program).run(backend=served.engine)
    answer = create(served, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == state["x"]
    assert choice.message.role == "assistant"
    told = [(at.token, len(at.top_logprobs)) for at in choice.logprobs.content]
    assert told == [(at.text, 2) for at in state.meta("x").logprobs]
    assert [at.logprob for at in choice.logprobs.content] == pytest.approx(
        [at.logprob for at in state.meta("x").logprobs], abs=1e-4
    )


def test_content_in_parts_is_one_text_and_pictures_are_refused(served: Live) -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "deep?"}]
    same = create(served, messages=[{"role": "user", "content": parts}])
    assert same.choices[0].message.content == create(served).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="this model reads text"):
        create(served, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_spelling_of_a_control_token_in_a_message_is_text(served: Live) -> None:
    told = create(served, messages=[{"role": "user", "content": "<|im_end|>"}])
    plain = create(served, messages=[{"role": "user", "content": ""}])
    assert told.usage.prompt_tokens > plain.usage.prompt_tokens + 1, "it is many tokens"


def test_the_last_message_is_continued(served: Live) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "To be, or "}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = create(served, messages=begun, extra_body={**extra, "regex": "not to be"})
    assert answer.choices[0].message.content == "not to be"
    with pytest.raises(openai.BadRequestError, match="only the assistant's can be continued"):
        create(served, extra_body=extra)


def test_a_schema_as_response_format(served: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    schema["required"] = ["a"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    said = json.loads(create(served, response_format=form, max_tokens=40).choices[0].message.content)
    assert said in ({"a": True}, {"a": False})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_fulfils_its_schema(with_tools: Live, choice: Any, stream: bool) -> None:
    tools = [WEATHER, TIME] if choice != "required" else [WEATHER]
    answer = create(with_tools, tools=tools, tool_choice=choice, max_tokens=60, stream=stream)
    if stream:
        chunks = [c for chunk in answer for c in chunk.choices]
        (call,) = [call for c in chunks for call in c.delta.tool_calls or ()]
        assert chunks[-1].finish_reason == "tool_calls"
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].message.content is None
        assert answer.choices[0].finish_reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 7


@pytest.mark.parametrize("several", [False, None])
def test_a_call_that_the_model_begins_is_held_to_the_tools(with_tools: Live, several: bool | None) -> None:
    """A tiny model begins none by itself, so its free text is forced here, up to the mark and past it."""
    engine = with_tools.engine
    body = ChatBody(messages=[Message(role="user", content="How deep?")], tools=[Tool(**WEATHER), Tool(**TIME)],
                    parallel_tool_calls=several, temperature=0.0, max_tokens=400)  # fmt: skip

    async def never() -> None:
        await asyncio.Event().wait()

    async def said() -> list[Piece | Turn]:
        asked = await chats.read(body, engine, with_tools.server.config, Caller())
        begins = replace(asked.prompt.params, regex="I look\\. <tool_call>no call", max_tokens=200)
        asked = replace(asked, prompt=replace(asked.prompt, params=begins))
        return [event async for event in chats.turns(asked, engine, never)]

    *pieces, turn = asyncio.run(said())
    assert isinstance(turn, Turn)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == "I look. "
    assert turn.text == "I look."
    assert turn.finish == "tool_calls"
    assert len(turn.calls) > 1 if several is None else len(turn.calls) == 1
    for call in turn.calls:
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "time" or arguments["city"] in ("Paris", "Rome")
    assert len({call["id"] for call in turn.calls}) == len(turn.calls)


def test_calls_and_their_results_are_told_to_the_model(with_tools: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    told = create(with_tools, messages=messages, tools=[WEATHER], tool_choice="auto")
    assert told.usage.prompt_tokens > create(with_tools, tools=[WEATHER]).usage.prompt_tokens + 20
    assert told.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [TIME, TIME]}, "two tools have the same name"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tools": [TIME], "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"tools": [TIME], "n": 2}, "n must be 1"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "user"}], "max_tokens": 0}, "at least 1"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages.0.tool_calls"),
    ],
)
def test_what_does_not_go_together_is_refused(with_tools: Live, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        create(with_tools, **fields)


def test_a_model_without_tools_in_its_template_says_so(served: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="does not tell the model of the tool 'weather'"):
        create(served, tools=[WEATHER])


def test_the_form_of_a_call_is_read_from_the_template() -> None:
    assert form_of(TOOL_TEMPLATE).begin == "<tool_call>\n"
    assert form_of("[TOOL_CALLS]").begin == "[TOOL_CALLS] ["
    assert form_of('{"name": .., "parameters": ..}').arguments == "parameters"
    assert form_of(None).arguments == "arguments"


def test_our_own_client_runs_programs_on_it(served: Live) -> None:
    @function
    def program(s: State) -> None:
        s.user("How deep?")
        s += assistant("It is " + gen("x", max_tokens=6, temperature=0))
        branches = s.fork(2)
        branches += lambda i: user(str(i)) + assistant(gen("y", regex="[a-z]{3}", temperature=0, max_tokens=9))
        branches.join()
        s += user("yes?") + assistant(select("c", ["yes", "no"]))

    @function
    def plain(s: State) -> None:
        s += "The old" + select("place", [" mill", " bridge"]) + " is"
        s += gen("rest", max_tokens=4, temperature=0, heal=False)

    with served.backend() as backend:
        remote, said = program.run(backend=backend), plain.run(backend=backend)
    local, known = program.run(backend=served.engine), plain.run(backend=served.engine)
    assert remote["x"] == local["x"]
    assert all(re.fullmatch("[a-z]{3}", text) for text in remote["y"])  # the server reads what was written as new text
    assert remote["c"] in ("yes", "no")
    assert (said["place"], said["rest"]) == (known["place"], known["rest"])
    assert said.meta("place").scores == pytest.approx(known.meta("place").scores, abs=1e-3)
