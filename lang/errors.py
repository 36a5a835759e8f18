"""What a program can get wrong before anything runs."""

from __future__ import annotations


class LangError(Exception):
    """A program says something that cannot be meant; the base of the language's errors."""


class OptionError(LangError, ValueError):
    """An option of a call has a value it cannot have."""


class ConstraintError(LangError, ValueError):
    """A regex or a list of choices does not describe a set of texts."""


class CallError(LangError, TypeError):
    """A call has an argument that does not exist, or lacks one that it needs."""
