"""The verbs of a program. Each gives back an operation to append to a state, and does nothing else.

Options are checked here, where the user wrote them, and every error begins with the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Never

from . import checks
from .checks import OnTruncate, characters, nearest, shown
from .checks import choices as checked_choices
from .errors import CallError, ConstraintError, OptionError
from .ops import (
    CHOICES_METHODS,
    ChoicesMethod,
    Concat,
    Expr,
    Gen,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    Tools,
    call_text,
    flatten,
)
from .options import LANGUAGES, OPTION_NAMES, GenOptions, checked_options
from .regex import normalize
from .schema import checked_type


def gen(
    name: str | None = None,
    *positional: Never,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: str | Iterable[str] | None = None,
    stop_regex: str | Iterable[str] | None = None,
    stop_token_ids: int | Iterable[int] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
    seed: int | None = None,
    n: int | None = None,
    ignore_eos: bool | None = None,
    heal: bool | None = None,
    return_logprob: bool | None = None,
    top_logprobs: int | None = None,
    logprob_start_len: int | None = None,
    regex: str | None = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    json_schema: object = None,
    grammar: str | None = None,
    dtype: object = None,
    on_truncate: OnTruncate | None = None,
    **unknown: Never,
) -> Gen | Select:
    """Generate text, and keep it as the variable `name` if there is one.

    An option that is not given is taken from the run, else from the function, else from the backend.

    Args:
        max_tokens: at most so many tokens; 256 if nobody says otherwise.
        min_tokens: before these no token ends the text; a `stop` still does.
        stop: end before this text, or before the first of several to come; it is not part of the result.
        stop_regex: likewise before a text that matches this pattern, or one of several.
        stop_token_ids: likewise at one of these tokens of the model's vocabulary.
        temperature: 0 takes the likeliest token each time; 1 samples as the model says.
        top_p: sample among the likeliest tokens that together have this probability.
        top_k: sample among so many likeliest tokens; -1 turns it off.
        min_p: sample among the tokens that are at least so many times as likely as the likeliest; 0 turns it off.
        frequency_penalty, presence_penalty: make a token less likely for each time that it was generated, or once; 0
            turns it off.
        repetition_penalty: divides the score of a token that was generated or is in the prompt; 1 turns it off.
        logit_bias: added to the scores of single tokens, by their ids.
        seed: makes sampling repeatable.
        n: draw so many samples; the variable is then a list of them, and the state goes on with the first.
        ignore_eos: go on where the model would end.
        heal: where this follows constant text, the last tokens of that text may become the beginning of longer ones,
            as if all had been written in one go; the text stays what it is. True if nobody says otherwise.
        return_logprob: `s.meta(name).logprobs` has the log-probability of each token,
        top_logprobs: and of so many of the likeliest in its place.
        logprob_start_len: and `s.meta(name).prompt_logprobs` those of the prompt from this token on.
        regex: the whole text must match this pattern.
        choices: the text must be one of these; of equal ones the first counts. Without `temperature` in this
            call it is the likeliest, as by `select`; with it, one of them is drawn, token by token.
        choices_method: the rule that decides which is the likeliest: see `branchwise.lang.choices`.
        json_schema: the text is JSON of this schema (a dict, True, or JSON text), or of this type: a Pydantic model or
            `TypeAdapter`, a dataclass, a TypedDict, an Enum, `list[...]` and more, see `branchwise.lang.schema`. The
            variable is then the value that the text stands for: what `json.loads` gives, or an instance of the type.
        grammar: the whole text must be of this context-free grammar, in Lark's syntax as llguidance reads it.
        dtype: `json_schema=` for a type: `dtype=int` makes the variable an int.
        on_truncate: what happens when max_tokens comes before such a text is complete. "keep" leaves it as far as it
            is, and a value cannot be read; "close" takes a short way to a complete text while there is room for it.
    """
    call = _checked_call("gen", name)
    if positional:
        raise CallError(f"{_with(call, repr(positional[0]))}: options are given by name. Write max_tokens=...")
    _refuse_unknown(call, unknown, (*OPTION_NAMES, "choices_method", "dtype"))
    if dtype is not None and json_schema is not None:
        raise OptionError(f"{call}: dtype and json_schema are both given, and only one can say what the text must be.")
    given = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop,
        "stop_regex": stop_regex,
        "stop_token_ids": stop_token_ids,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": logit_bias,
        "seed": seed,
        "n": n,
        "ignore_eos": ignore_eos,
        "heal": heal,
        "return_logprob": return_logprob,
        "top_logprobs": top_logprobs,
        "logprob_start_len": logprob_start_len,
        "regex": regex,
        "choices": choices,
        "json_schema": json_schema if dtype is None else checked_type(dtype, f"{call}: dtype"),
        "grammar": grammar,
        "on_truncate": on_truncate,
    }
    options = checked_options(call, given)
    languages = [option for option in LANGUAGES if getattr(options, option) is not None]
    if len(languages) > 1:
        first, second = languages[:2]
        raise OptionError(f"{call}: {first} and {second} are both given, and only one can say what the text must be.")
    if options.choices is not None and options.temperature is None:
        _check_nothing_drawn(call, options)
        return _select(call, name, options.choices, choices_method or CHOICES_METHODS[0], options.heal)
    if choices_method is not None:
        why = "with temperature= one of the choices is drawn" if options.choices else "there are no choices"
        raise OptionError(f"{call}: choices_method is given, but {why}.")
    if options.regex is not None:
        _check_regex(call, options.regex)
    return Gen(name, options)


def gen_int(name: str | None = None, **options: Any) -> Gen:
    """`gen(dtype=int)`: a whole number."""
    return _gen_of(name, options, dtype=int)


def gen_string(name: str | None = None, **options: Any) -> Gen:
    """`gen(dtype=str)`: a text in double quotes, as JSON writes it; the variable is what stands between them."""
    return _gen_of(name, options, dtype=str)


def gen_json(name: str | None = None, schema: object = True, **options: Any) -> Gen:
    """`gen(json_schema=schema)`: JSON of a schema or a type, any JSON without one."""
    return _gen_of(name, options, json_schema=schema)


def _gen_of(name: str | None, options: dict[str, Any], **said: Any) -> Gen:
    made = gen(name, **options, **said)
    assert isinstance(made, Gen), f"{options} and {said} make a {made!r}"
    return made


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    *positional: Never,
    choices_method: ChoicesMethod = "token_length_normalized",
    heal: bool | None = None,
    **unknown: Never,
) -> Select:
    """Append the likeliest of `choices`, and keep it as the variable `name` if there is one.

    Args:
        choices: at least one text, none empty; of equal ones the first counts.
        choices_method: the rule that decides: see `branchwise.lang.choices`.
        heal: as in `gen`. Tokens at the end of the text before that are part of a longer one in some choice count as
            tokens of all choices.
    """
    call = _checked_call("select", name)
    if positional:
        raise CallError(f"{call}: takes a name and choices, got {len(positional)} more. Options are given by name.")
    if "temperature" in unknown:
        raise CallError(
            f"{call}: select takes the likeliest and draws nothing, so it has no temperature. Leave it out; "
            "gen(..., choices=[...], temperature=...) draws."
        )
    _refuse_unknown(call, unknown, ("choices", "choices_method", "heal"))
    if choices is None:
        raise CallError(f'{call}: choices are missing. Write select("name", ["yes", "no"]).')
    heal = checked_options(call, {"heal": heal}).heal
    return _select(call, name, checked_choices(choices, f"{call}: choices"), choices_method, heal)


def text(value: str, *, raw: bool = False) -> Text:
    """Text that is only text: the spelling of a control token in it means nothing. For what others wrote.

    Args:
        raw: the contrary: the spelling is the token, inside a role as well. For what nobody else can write into.
    """
    if not isinstance(value, str):
        raise OptionError(f"text(): the value must be a string, got {shown(value)}.")
    return Text(characters(value, "text(): the value"), control=checks.flag(raw, "text(): raw"))


def role(name: str, expr: Expr | str, /, **fields: object) -> Concat:
    """`expr` as a whole turn of the role `name`; `system`, `user` and `assistant` have verbs of their own.

    Args:
        fields: what else the message says to the model's chat template, as JSON values: the `name` or `tool_call_id`
            of a tool's result, `tool_calls` or `reasoning_content` of an assistant. Templates leave out fields that
            they do not know.
    """
    if not isinstance(name, str) or not name:
        raise OptionError(f"role(): the name must be a string that is not empty, got {shown(name)}.")
    characters(name, "role(): the name")
    call = f'role("{name}")'
    for reserved in ("role", "content"):
        if reserved in fields:
            raise OptionError(f"{call}: {reserved} is what its first two arguments say. Leave it out.")
    if "tool_calls" in fields:
        fields["tool_calls"] = checks.functions(fields["tool_calls"], f"{call}: tool_calls")
    said = checks.json_text(fields, f"{call}: the fields") if fields else ""
    return Concat((RoleBegin(name, said), *flatten(expr), RoleEnd(name)))


def tools(schemas: Iterable[Mapping[str, object]]) -> Tools:
    """What the model may call in the turns that follow: its chat template tells it.

    Args:
        schemas: dicts in OpenAI's form, `{"type": "function", "function": {"name": ..., "description": ...,
            "parameters": {...}}}`; an empty list takes back what was said before.
    """
    return Tools(checks.json_text(checks.functions(schemas, "tools(): the schemas"), "tools(): the schemas"))


def system(expr: Expr | str) -> Concat:
    """`expr` as the system's turn."""
    return role("system", expr)


def user(expr: Expr | str) -> Concat:
    """`expr` as the user's turn."""
    return role("user", expr)


def assistant(expr: Expr | str) -> Concat:
    """`expr` as the assistant's turn."""
    return role("assistant", expr)


def system_begin() -> RoleBegin:
    """The system's turn begins."""
    return RoleBegin("system")


def system_end() -> RoleEnd:
    """The system's turn ends."""
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """The user's turn begins."""
    return RoleBegin("user")


def user_end() -> RoleEnd:
    """The user's turn ends."""
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """The assistant's turn begins."""
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    """The assistant's turn ends."""
    return RoleEnd("assistant")


def _check_nothing_drawn(call: str, options: GenOptions) -> None:
    """Choices without a temperature: no other option has anything to say."""
    for option in OPTION_NAMES:
        if option not in ("choices", "heal") and getattr(options, option) is not None:
            raise OptionError(
                f"{call}: choices without temperature= give the likeliest one, whole, whatever {option} is. "
                "Leave it out, or give temperature= to draw one of them."
            )


def _select(
    call: str, name: str | None, choices: tuple[str, ...], method: ChoicesMethod, heal: bool | None
) -> Select:
    if method not in CHOICES_METHODS:
        raise OptionError(f"{call}: choices_method must be one of {', '.join(CHOICES_METHODS)}, got {method!r}.")
    return Select(name, choices, method, heal)


def _checked_call(verb: str, name: object) -> str:
    if name is not None and not isinstance(name, str):
        raise OptionError(f"{verb}(): the name must be a string, got {shown(name)}.")
    if name == "":
        raise OptionError(f'{verb}(""): the name is empty. Leave it out if the text needs no name.')
    return call_text(verb, name)


def _refuse_unknown(call: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    for name in unknown:
        raise CallError(f"{call}: there is no option {name}. {nearest(name, known)}")


def _check_regex(call: str, pattern: str) -> None:
    try:
        normalize(pattern)
    except ConstraintError as error:
        written = f'regex="{pattern if len(pattern) <= 60 else pattern[:57] + "..."}"'
        raise ConstraintError(f"{_with(call, written)}: {error}") from error


def _with(call: str, argument: str) -> str:
    """`call` with one more argument: `gen("x")` becomes `gen("x", 32)`."""
    return f"{call[:-1]}{'' if call.endswith('()') else ', '}{argument})"
