"""The text that a constraint begins with, whatever is sampled."""

from __future__ import annotations

from . import State
from .vocab import Vocab

MOST_BYTES = 1 << 16
"""No further: a plan needs no more, and a language may force a text without end."""


def forced_text(state: State, vocab: Vocab) -> tuple[bytes, bool]:
    """What every text of the language goes on with from here, and whether that is all; `state` is used up.

    Byte by byte, as tokens could be longer than what is certain. Ends early in a vocabulary without tokens for bytes.
    """
    said = bytearray()
    while not state.is_complete and len(said) < MOST_BYTES:
        firsts = {vocab.token_bytes[token][:1] for token in state.mask().nonzero()[:, 0].tolist()}
        if len(firsts) != 1:
            break
        (byte,) = firsts
        if not any(state.advance(token) for token in vocab.spellings.get(byte, ())):
            break
        said += byte
    return bytes(said), state.is_finished
