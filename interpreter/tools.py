"""Tools and calls of tools, in the forms that chat templates take.

Both are JSON in OpenAI's form: `{"type": "function", "function": {"name": ..., ...}}`. Of a call's `arguments`
some templates want the object and write it as JSON themselves, others want the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any


def names(calls: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The names of the functions in schemas or calls."""
    for call in calls:
        name = _function(call).get("name")
        if isinstance(name, str):
            yield name


def with_arguments(calls: Sequence[Mapping[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """`calls` with the arguments of each as JSON, or as the object that it says."""
    return [_with_arguments(call, as_text=as_text) for call in calls]


def _with_arguments(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    function = dict(_function(call))
    arguments = function.get("arguments")
    if as_text and arguments is not None and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with suppress(ValueError):  # the model wrote it, and it is no JSON: then the text is all there is
            function["arguments"] = json.loads(arguments)
    return {**call, "function": function} if "function" in call else function


def is_python(calls: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether `text` shows the arguments of a call, objects, as Python writes them: the template wanted JSON."""
    every = [_function(call).get("arguments") for call in calls]
    objects = [arguments for arguments in every if isinstance(arguments, dict | list)]
    return any(str(a) in text and str(a) != json.dumps(a, ensure_ascii=False) for a in objects)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, those of keys as well."""
    match value:
        case str():
            return change(value)
        case list():
            return [each_text(item, change) for item in value]
        case dict():
            return {change(key): each_text(item, change) for key, item in value.items()}
        case _:
            return value


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}
