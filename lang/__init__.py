"""What a program says: operations as data, the verbs that make them, and `Program`. Standard library only."""

from .api import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    role,
    select,
    system,
    system_begin,
    system_end,
    text,
    user,
    user_begin,
    user_end,
)
from .errors import CallError, ConstraintError, LangError, OptionError
from .ops import CHOICES_METHODS, ChoicesMethod, Concat, Expr, Gen, Op, RoleBegin, RoleEnd, Select, Text, Var, flatten
from .options import FALLBACK, GenOptions
from .program import Call, Program, Runner, make_program

__all__ = [
    "CHOICES_METHODS",
    "FALLBACK",
    "Call",
    "CallError",
    "ChoicesMethod",
    "Concat",
    "ConstraintError",
    "Expr",
    "Gen",
    "GenOptions",
    "LangError",
    "Op",
    "OptionError",
    "Program",
    "RoleBegin",
    "RoleEnd",
    "Runner",
    "Select",
    "Text",
    "Var",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flatten",
    "gen",
    "make_program",
    "role",
    "select",
    "system",
    "system_begin",
    "system_end",
    "text",
    "user",
    "user_begin",
    "user_end",
]
