"""Roles to text, by the model's own chat template.

A conversation is loose text and turns, in order. The text of the turns is what the model's jinja
template makes of them, run in the sandbox of transformers; nothing of a template is written again
here. Loose text stands where the program put it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from .encode import CUT
from .errors import ChatError

log = logging.getLogger("branchwise")

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""For models without a template: each turn is `Role: text` and an empty line."""


@dataclass(frozen=True, slots=True)
class Loose:
    """Text outside of any turn, escaped."""

    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A message; `content` is escaped. Only the last item of a conversation may be open."""

    role: str
    content: str
    open: bool


Item: TypeAlias = Loose | Turn


class ChatTemplate:
    """A template and the special tokens it may name."""

    def __init__(self, template: str | None, *, bos_token: str, eos_token: str) -> None:
        if template is None:
            log.info("the model has no chat template; turns are written as `Role: text`")
        self._template = template or PLAIN_TEMPLATE
        self._bos_token, self._eos_token = bos_token, eos_token

    def render(self, turns: Sequence[Turn]) -> str:
        """The text of `turns`, up to the end of what is written of the last one if that is open.

        Raises:
            ChatError: the template refuses this order of roles.
        """
        if not turns:
            return ""
        *closed, last = turns
        if not last.open:
            return self._run(turns, add_generation_prompt=False)
        if last.role == "assistant" and closed:
            return self._run(closed, add_generation_prompt=True) + last.content
        whole = self._run([*closed, Turn(last.role, last.content + CUT, open=False)], add_generation_prompt=False)
        text, found, _ = whole.partition(CUT)
        if not found:
            raise ChatError(
                f"the chat template leaves out the text of role {last.role!r}, so nothing can be generated in it."
            )
        return text

    def _run(self, turns: Sequence[Turn], *, add_generation_prompt: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return self._render(messages, add_generation_prompt)
        except TemplateSyntaxError as error:
            raise ChatError(f"the model's chat template cannot be read: line {error.lineno}: {error}") from error
        except TemplateError as error:
            roles = ", ".join(turn.role for turn in turns)
            raise ChatError(f"the model's chat template refuses the roles {roles}: {error}") from error
        except Exception as error:  # a template is a program of its own
            raise ChatError(f"the model's chat template fails: {type(error).__name__}: {error}.") from error

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        texts: Any = render_jinja_template(
            [messages],
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._bos_token,
            eos_token=self._eos_token,
        )
        text: str = texts[0][0]  # one conversation; its text, without the spans of generated text
        return text


def compose(items: Sequence[Item], template: ChatTemplate) -> str:
    """The whole text of a conversation, escaped.

    Raises:
        ChatError: the template refuses the roles, or rewrites turns that loose text follows.
    """
    text, rendered = "", ""
    turns: list[Turn] = []
    loose = False
    for index, item in enumerate(items):
        match item:
            case Loose(more):
                text, loose = text + more, True
            case Turn():
                turns.append(item)
                if index + 1 < len(items) and isinstance(items[index + 1], Turn):
                    continue  # rendered with the turns that follow
                now = template.render(turns)
                if now.startswith(rendered):
                    text += now[len(rendered) :]
                elif not loose:
                    text = now
                else:
                    raise ChatError(
                        f"the model's chat template writes earlier turns anew when role {item.role!r} begins, but "
                        "there is text outside of the roles. Put that text into a role."
                    )
                rendered = now
    return text
