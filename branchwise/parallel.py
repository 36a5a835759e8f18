"""What to make of several answers: vote, keep the best, search a tree of branches by score."""

from branchwise.interpreter.parallel import beam_search, best_of, vote

__all__ = ["beam_search", "best_of", "vote"]
