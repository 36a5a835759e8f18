"""What can go wrong while a program runs."""

from __future__ import annotations


class RunError(Exception):
    """A program could not do what it says; the base of the interpreter's errors."""


class GenerationError(RunError):
    """A call of a program failed where it was computed; the cause is chained."""


class InvalidText(GenerationError):
    """A generated text is not a value of the schema or type that was asked for; `text` holds it."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text

    def __reduce__(self) -> tuple[type[InvalidText], tuple[str, str]]:
        return type(self), (str(self), self.text)


class TruncatedText(InvalidText):
    """A generated text ends before it is a value: a limit or a stop came first."""


class Cancelled(RunError):
    """What is waited for was cancelled before it was done."""


class UnknownVariable(RunError, KeyError):
    """A variable is read that nothing has set, and that nothing queued will set."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show its repr


class NoBackend(RunError):
    """There is nothing to run a program on."""


class ChatError(RunError):
    """The model's chat template cannot say what the roles of a program say."""
