"""Text to tokens and back, exactly.

The model's own tokenizer, with what it leaves to chance made explicit: whether a text stands at the
start of a conversation or continues one, and whether `<|im_end|>` in it is a control token or ten
characters. Knows vocabularies; knows no template and no conversation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from .errors import EngineError, ModelNotFound, RequestError
from .messages import shortened
from .model.configuration import read_config
from .models import read_json
from .text import Detokenizer

_WORDS = "the river runs, in 12 miles; isn't it so? yes it is"
_SAMPLE = "The cat  sat, 12 + (3); \u00e9 \u6f22 \U0001f600\n"
WORD_START = "\u2581"  # what SentencePiece writes for a space


class Tokenizer:
    """The vocabulary of a model and both ways through it. Immutable; any thread may use it.

    Attributes:
        vocab_size: of the model, which may be larger than what the tokenizer knows.
        token_bytes: [vocab_size] what each token spells; b"" for special and unused ones.
        special_ids: tokens that are never text; all `eos_ids` are among them.
        eos_ids: every token that ends a generation, wherever the model names it.
        bos_id: the token that begins a conversation, if there is one.
        bos_token, eos_token: their spelling, for templates; "" where there is none.
        chat_template, tool_template: the model's jinja template, and the one for tools, if it has any.
        fingerprint: SHA-256 of all that decides how text becomes tokens.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer of the model in `folder`.

        Raises:
            ModelNotFound: there is no tokenizer in it.
            EngineError: it is of a kind whose tokens have no exact bytes.
        """
        model = _load(folder)
        backend: Backend = model.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        text = backend.to_str()
        spec = json.loads(text)

        self.bos_token: str = model.bos_token or ""
        self.eos_token: str = model.eos_token or ""
        self.bos_id: int | None = model.bos_token_id
        self.chat_template = _chat_template(model.chat_template, "default")
        self.tool_template = _chat_template(model.chat_template, "tool_use") or self.chat_template
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

        config = read_json(folder / "config.json")
        config = {**config, **config.get("text_config", {})}
        self.vocab_size: int = config.get("vocab_size") or len(model)
        named = (read_json(folder / "generation_config.json"), config, {"eos_token_id": model.eos_token_id})
        self.eos_ids = frozenset(token for source in named for token in _as_ids(source.get("eos_token_id")))

        continuing = _without_dummy_space(spec)
        self._adds_space = continuing is not None
        self._starting = _both_ways(text)
        self._continuing = self._starting if continuing is None else _both_ways(json.dumps(continuing))

        added = {token["id"]: token["content"] for token in spec["added_tokens"] if token["special"]}
        self._special_text = {t: spelled for t, spelled in added.items() if not self._is_a_character(t, spelled)}
        self._special_text |= {token: backend.id_to_token(token) or "" for token in self.eos_ids}
        self.special_ids = frozenset(self._special_text)
        self.token_bytes = _token_bytes(backend, spec, self.vocab_size, self.special_ids)
        self._prefix = _prefix(backend)
        is_unigram = spec["model"]["type"] == "Unigram"
        self._lookalikes = {
            True: _lookalikes(()) if is_unigram else None,
            False: _lookalikes(self._special_text.values()) if is_unigram else None,
        }
        self._test_spelling(backend, spec["model"]["type"])

    @property
    def special_texts(self) -> Mapping[int, str]:
        """How special tokens are spelled, by id."""
        return self._special_text

    @cached_property
    def parts_at_words(self) -> bool:
        """Whether a text that is cut between a letter and the space before another one has the tokens of its parts.

        So it is if no token has a letter and a space behind it: then none lies across the cut, and what BPE merges or
        Unigram chooses on one side changes nothing on the other. Letters and spaces of ASCII.
        """
        across = re.compile(rb"[A-Za-z] ")
        edges = re.compile("^[A-Za-z ]|[A-Za-z ]$|[A-Za-z] [A-Za-z]")  # of these, spaces may belong to the token
        if any(map(across.search, self.token_bytes)) or any(map(edges.search, self._special_text.values())):
            return False
        whole = self.encode(_WORDS, at_start=False, control=False)
        cuts = [match.start() for match in re.finditer("(?<=[a-z])(?= [a-z])", _WORDS)]
        return all(
            self.encode(_WORDS[:cut], at_start=False, control=False)
            + self.encode(_WORDS[cut:], at_start=False, control=False)
            == whole
            for cut in cuts
        )

    def encode(self, text: str, *, at_start: bool, control: bool, bos: bool = True) -> list[int]:
        """The tokens of `text`.

        Args:
            at_start: it begins a conversation: the tokens the model's own tokenizer gives, with the BOS if
                that adds one. A BOS that `text` spells already is not doubled.
                Otherwise it continues one: no BOS, and no space that is not in the text.
            control: the spelling of a control token is that token; otherwise it is plain text.
            bos: False leaves the BOS to the text, as a chat template does that writes its own or wants none.
        """
        tokens: list[int] = []
        ways = self._starting if at_start else self._continuing
        for piece in _cut(text, self._lookalikes[control]):
            tokens += ways[control].encode(piece, add_special_tokens=False).ids
            ways = self._continuing
        if not (at_start and bos) or (control and tokens[: len(self._prefix)] == self._prefix):
            return tokens
        return [*self._prefix, *tokens]

    def decode(self, tokens: Iterable[int], *, at_start: bool = False) -> str:
        """The text of `tokens`, special ones spelled out. With `at_start`, the inverse of `encode(at_start=True)`."""
        stream = self.detokenizer(at_start=at_start, specials=True)
        return "".join([*map(stream.push, self._checked(tokens)), stream.flush()])

    def detokenizer(self, *, at_start: bool = False, specials: bool = False) -> Detokenizer:
        """A fresh stream from tokens to text. Special tokens are left out unless asked for."""
        return Detokenizer(
            self.token_bytes,
            specials=self._special_text if specials else None,
            drop_first_space=at_start and self._adds_space,
        )

    def spelled(self, tokens: Sequence[int], skip: int = 0) -> list[str]:
        """The text that becomes certain with each of the tokens, the first `skip` bytes left out."""
        stream = self.detokenizer()
        texts = [stream.push(token, skip=0 if index else skip) for index, token in enumerate(tokens)]
        return [*texts[:-1], texts[-1] + stream.flush()] if texts else []

    def _is_a_character(self, token: int, spelled: str) -> bool:
        """Whether a special token is the only way to write a character: then it is text like any other."""
        return len(spelled) == 1 and self._continuing[False].encode(spelled, add_special_tokens=False).ids == [token]

    def _test_spelling(self, backend: Backend, kind: str) -> None:
        """Refuse a vocabulary whose tokens are spelled in a way that is not known here: all text would be wrong."""
        tokens = self.encode(_SAMPLE, at_start=False, control=False)
        ours, theirs = self.decode(tokens), backend.decode(tokens, skip_special_tokens=True)
        if ours not in (_SAMPLE, theirs):  # its own way back may lose spaces, and its way to tokens may change letters
            raise EngineError(
                f"the tokens of this {kind} tokenizer do not spell their text: {_SAMPLE!r} comes back as {ours!r}. "
                "Use a model with byte-level BPE or SentencePiece."
            )

    def _checked(self, tokens: Iterable[int]) -> Iterator[int]:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"token id {token} is outside the vocabulary of {self.vocab_size} tokens.")
            yield token


def _load(folder: Path) -> Any:
    """The model's own tokenizer, as transformers reads it: odd models have their rules there."""
    try:
        model = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what is wrong with a folder is raised as whatever it caused in there
        if (folder / "config.json").is_file():
            read_config(folder)  # transformers looks for the kind of tokenizer in it: it may be what is wrong
        read_json(folder / "tokenizer.json")
        reason = shortened(" ".join(str(error).split()) or type(error).__name__, 200)
        raise ModelNotFound(
            f"{folder}: no tokenizer can be loaded ({reason}). A model folder needs tokenizer.json, or tokenizer.model "
            "with what transformers asks for to read it."
        ) from error
    if not getattr(model, "is_fast", False):
        raise ModelNotFound(
            f"{folder}: only a tokenizer written in Python was found ({type(model).__name__}). "
            "Convert it to tokenizer.json once, with save_pretrained() of a fast tokenizer."
        )
    return model


def _both_ways(spec: str) -> dict[bool, Backend]:
    """The tokenizer with control tokens seen and unseen: two of them, since the switch is not thread-safe."""
    seeing, unseeing = Backend.from_str(spec), Backend.from_str(spec)
    unseeing.encode_special_tokens = True
    return {True: seeing, False: unseeing}


def _prefix(backend: Backend) -> list[int]:
    """The tokens that the tokenizer puts before every text by itself."""
    encoding = backend.encode("a")
    for position, special in enumerate(encoding.special_tokens_mask):
        if not special:
            return list(encoding.ids[:position])
    return []


def _lookalikes(specials: Iterable[str]) -> re.Pattern[str]:
    """Where text spells an entry of the vocabulary that does not stand for its own spelling: a byte, or one of these.

    A Unigram model finds `</s>` and `<0x41>` in text like any word, added token or not. Others never do: they
    build their tokens from characters by merges, and none leads there.
    """
    return re.compile("(?=" + "|".join([*map(re.escape, specials), "<0x[0-9A-F]{2}>"]) + ")")


def _cut(text: str, lookalikes: re.Pattern[str] | None) -> list[str]:
    """`text` in pieces: cut after the first character of each lookalike, so that no token can span it."""
    if lookalikes is None:
        return [text]
    ends = [0, *(match.start() + 1 for match in lookalikes.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def _chat_template(template: str | dict[str, str] | None, name: str) -> str | None:
    return template.get(name) if isinstance(template, dict) else template


def _as_ids(value: int | Sequence[int] | None) -> Sequence[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A component of a tokenizer and, of a sequence, its members."""
    if part is None:
        return
    yield part
    for key in ("pretokenizers", "normalizers", "decoders"):
        for member in part.get(key, ()):
            yield from _parts(member)


# ---------------------------------------------------------------------------------------- bytes of a token


def _token_bytes(backend: Backend, spec: dict[str, Any], vocab_size: int, special_ids: Set[int]) -> list[bytes]:
    """What each token of the model's vocabulary spells."""
    spell = _speller(spec)
    plain = {token["content"] for token in spec["added_tokens"]}
    texts = ((token, backend.id_to_token(token)) for token in range(vocab_size))
    return [
        b"" if text is None or token in special_ids else text.encode() if text in plain else spell(text)
        for token, text in texts
    ]


def _speller(spec: dict[str, Any]) -> Callable[[str], bytes]:
    """How an entry of the vocabulary is spelled in bytes.

    Raises:
        EngineError: the vocabulary is of a kind that loses the exact text.
    """
    parts = [*_parts(spec["pre_tokenizer"]), *_parts(spec["normalizer"]), *_parts(spec["decoder"])]
    if any(part["type"] == "ByteLevel" for part in parts):
        return _byte_level
    if any(part["type"] in ("Metaspace", "ByteFallback") or _marks_spaces(part) for part in parts):
        return _sentencepiece
    raise EngineError(
        f"a {spec['model']['type']} tokenizer with neither a byte-level nor a SentencePiece vocabulary is not "
        "supported: its tokens have no exact text. Use a model with byte-level BPE or SentencePiece."
    )


def _marks_spaces(part: dict[str, Any]) -> bool:
    return part["type"] == "Replace" and WORD_START in (part["content"], part["pattern"].get("String"))


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:
        return text.encode()  # an entry outside the alphabet was added as plain text


def _sentencepiece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace(WORD_START, " ").encode()


# ------------------------------------------------------------------------------------------- continuations


def _without_dummy_space(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The same tokenizer for text that continues other text; None if it puts no space of its own before text."""
    before = {key: spec[key] for key in ("pre_tokenizer", "normalizer")}
    after: dict[str, Any] = json.loads(json.dumps(before))
    for part in _parts(after["pre_tokenizer"]):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    normalizers = list(_parts(after["normalizer"]))
    if any(part["type"] == "Prepend" for part in normalizers):
        kept = [part for part in normalizers if part["type"] not in ("Sequence", "Prepend")]
        after["normalizer"] = {"type": "Sequence", "normalizers": kept}
    return {**spec, **after} if after != before else None
