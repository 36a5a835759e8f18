"""Roles to text, by the model's own chat template.

A conversation is loose text, turns and tools, in order. The text of the turns is what the model's jinja
template makes of them, run in the sandbox of transformers; nothing of a template is written again
here. Loose text stands where the program put it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from . import tools
from .encode import CUT, unescape
from .errors import ChatError

log = logging.getLogger("branchwise")

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""For models without a template: each turn is a line `Role:`, its text and an empty line."""

SHOWN_ROLES = 4
"""So many roles at the end of a conversation are named in an error."""


@dataclass(frozen=True, slots=True)
class Loose:
    """Text outside of any turn, escaped."""

    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A message; all its text is escaped. Only the last item of a conversation may be open."""

    role: str
    content: str
    open: bool
    fields: Mapping[str, Any] = field(default_factory=dict)  # what else the message says: see `lang.role`


@dataclass(frozen=True, slots=True)
class Schemas:
    """Tools that the model may call in the turns that follow, in the form that templates take; all text escaped."""

    tools: Sequence[Mapping[str, Any]]


Item: TypeAlias = Loose | Turn | Schemas


class ChatTemplate:
    """A template, the one for tools if that is another, and the special tokens they may name."""

    def __init__(
        self, template: str | None, *, bos_token: str, eos_token: str, tool_template: str | None = None
    ) -> None:
        self._template = template
        self._tool_template = tool_template or template
        self._bos_token, self._eos_token = bos_token, eos_token
        self._warned = template is not None
        self._changes: set[str] = set()  # roles whose text the template keeps, but not letter by letter
        self._arguments_are_text = False  # how the template wants the arguments of calls

    def render(self, turns: Sequence[Turn], schemas: Sequence[Mapping[str, Any]] = (), *, first: bool = True) -> str:
        """The text of `turns`, up to the end of what is written of the last one if that is open.

        Args:
            schemas: of the tools.
            first: the conversation begins here. Otherwise it has its BOS already, and the template writes none before
                its first turn.

        Raises:
            ChatError: the template refuses this order of roles, or leaves out what a turn or the tools say.
        """
        if not turns:
            return ""
        text = self._rendered(turns, schemas, self._bos_token)
        bos = self._bos_token
        if not first and bos and text.startswith(bos) and not self._rendered(turns, schemas, "").startswith(bos):
            return text.removeprefix(bos)
        return text

    def _rendered(self, turns: Sequence[Turn], schemas: Sequence[Mapping[str, Any]], bos: str) -> str:
        def run(turns: Sequence[Turn], *, prompt: bool) -> str:
            return self._run(turns, schemas, bos, add_generation_prompt=prompt)

        *closed, last = turns
        if not last.open:
            text = run(turns, prompt=False)
            # Nobody is asked anything behind an answer, and some templates show what is asked for only where it is.
            return text if last.role == "assistant" else self._checked(text, turns, schemas, run)
        if last.role == "assistant" and closed and not last.fields:
            return self._checked(run(closed, prompt=True), closed, schemas, run) + last.content
        whole = run([*closed, _marked(last)], prompt=False)
        text, found, _ = whole.partition(CUT)
        if not found:
            raise _left_out(last)
        return self._checked(text, turns, schemas, run)

    def _checked(
        self, text: str, turns: Sequence[Turn], schemas: Sequence[Mapping[str, Any]], run: Callable[..., str]
    ) -> str:
        """`text`, in which nothing of what was said to the model is missing.

        What the assistant said before may be: templates leave out how it came to its answers.
        """
        at = 0
        for number, turn in enumerate(turns):
            content = turn.content.strip()
            if turn.role == "assistant" or turn.role in self._changes or not content:
                continue
            found = text.find(content, at)
            if found >= 0:
                at = found
            elif content not in text:  # it may be written in another form, or in no form
                marked = [*turns[:number], _marked(turn), *turns[number + 1 :]]
                if CUT not in run([replace(turn, open=False) for turn in marked], prompt=False):
                    raise _left_out(turn)
                self._changes.add(turn.role)
        for name in tools.names(schemas):
            if name not in text:
                raise ChatError(
                    f"the model's chat template does not tell the model of the tool {unescape(name)!r}: it was not "
                    "made for tools. Describe them in the system's turn."
                )
        for turn in turns:
            for name in tools.names(turn.fields.get("tool_calls", ())):
                if name not in text:
                    raise ChatError(f"the model's chat template leaves out the call of the tool {unescape(name)!r}.")
        return text

    def _run(
        self, turns: Sequence[Turn], schemas: Sequence[Mapping[str, Any]], bos: str, *, add_generation_prompt: bool
    ) -> str:
        def render(*, as_text: bool) -> str:
            return self._render(
                [_message(turn, arguments_are_text=as_text) for turn in turns], schemas, bos, add_generation_prompt
            )

        calls = any("tool_calls" in turn.fields for turn in turns)
        try:
            if not calls or self._arguments_are_text:
                return render(as_text=calls)
            try:
                text = render(as_text=False)
                if not any(tools.is_python(turn.fields.get("tool_calls", ()), text) for turn in turns):
                    return text
            except TypeError:  # the template adds them to a text
                pass
            text = render(as_text=True)
            self._arguments_are_text = True
            return text
        except TemplateSyntaxError as error:
            raise ChatError(f"the model's chat template cannot be read: line {error.lineno}: {error}") from error
        except TemplateError as error:
            roles = [unescape(turn.role) for turn in turns[-SHOWN_ROLES:]]
            named = ", ".join(["...", *roles] if len(turns) > SHOWN_ROLES else roles)
            raise ChatError(f"the model's chat template refuses the roles {named}: {error}") from error
        except Exception as error:  # a template is a program of its own
            raise ChatError(f"the model's chat template fails: {type(error).__name__}: {error}.") from error

    def _render(
        self,
        messages: list[dict[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        bos: str,
        add_generation_prompt: bool,
    ) -> str:
        if not self._warned:
            self._warned = True
            log.warning("the model has no chat template; each turn is written as a line `Role:` and its text")
        template = self._tool_template if schemas else self._template
        texts: Any = render_jinja_template(
            [messages],
            tools=[dict(schema) for schema in schemas] or None,
            chat_template=template or PLAIN_TEMPLATE,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos,
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
    schemas: Sequence[Mapping[str, Any]] = ()
    turns: list[Turn] = []
    began = loose = behind = False  # `behind`: the last turns are not in the text yet
    first = True
    for item in [*items, Loose("")]:
        match item:
            case Schemas(now):
                schemas = now
            case Turn():
                first = first if turns else not began
                turns.append(item)
                behind = True
            case Loose(more):
                if behind:
                    now_rendered = template.render(turns, schemas, first=first)
                    if now_rendered.startswith(rendered):
                        text += now_rendered[len(rendered) :]
                    elif not loose:
                        text = now_rendered
                    else:
                        raise ChatError(
                            "the model's chat template writes earlier turns anew when role "
                            f"{unescape(turns[-1].role)!r} begins, but there is text outside of the roles. Put that "
                            "text into a role."
                        )
                    rendered, behind = now_rendered, False
                text, loose, began = text + more, loose or bool(more), True
    return text


def _message(turn: Turn, *, arguments_are_text: bool) -> dict[str, Any]:
    fields = dict(turn.fields)
    if "tool_calls" in fields:
        fields["tool_calls"] = tools.with_arguments(fields["tool_calls"], as_text=arguments_are_text)
    return {**fields, "role": turn.role, "content": turn.content}


def _marked(turn: Turn) -> Turn:
    """`turn`, closed, with a mark at its end."""
    return replace(turn, content=turn.content + CUT, open=False)


def _left_out(turn: Turn) -> ChatError:
    return ChatError(
        f"the model's chat template leaves out the text of role {unescape(turn.role)!r}. Use another role for it."
    )
