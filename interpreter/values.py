"""What the variable of a generation is: its text, or the value that its text stands for."""

from __future__ import annotations

from typing import Any

from branchwise.lang import GenOptions
from branchwise.lang.checks import shown

from .errors import InvalidText, TruncatedText
from .session import Completion


def value_of(said: Completion, options: GenOptions) -> Any:
    """The text, or with `json_schema` the value of that type.

    Raises:
        TruncatedText: the text ends before it is a value.
        InvalidText: it is none: the schema could not be held in full, or the type has rules of its own.
    """
    if options.json_schema is None:
        return said.text
    if not said.complete:
        raise TruncatedText(
            f"the text was cut off before it was a value ({_end(said, options)}): {shown(said.text)}. "
            'Raise max_tokens, or give on_truncate="close"; s.meta(name).text has all of it.',
            said.text,
        )
    if said.violation:
        raise InvalidText(
            f"the text does not fulfil its schema, which could not be held in full: {said.violation}. "
            f"It is {shown(said.text)}; s.meta(name).text has all of it.",
            said.text,
        )
    try:
        return options.json_schema.read(said.text)
    except Exception as error:  # a type raises what it likes
        reason = " ".join(str(error).split()).rstrip(".")
        raise InvalidText(
            f"the text is no value of the type: {reason}. It is {shown(said.text)}; s.meta(name).text has all of it.",
            said.text,
        ) from error


def _end(said: Completion, options: GenOptions) -> str:
    if said.detail == "max_tokens":
        return f"max_tokens={options.max_tokens}"
    return said.detail or said.finish_reason
