"""The commands of `branchwise`: one file each, with a `run(options)` that prints and gives an exit code."""

from .perform import perform

__all__ = ["perform"]
