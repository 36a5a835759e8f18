"""What can go wrong in a command beyond what argparse sees, and beyond our own errors."""

from __future__ import annotations


class WrongArgument(Exception):
    """An argument names what there is not, or cannot be what it is for; the exit code is 2."""


class Failed(Exception):
    """The user's own code raised something; the message is its traceback, from the user's first line on."""
