"""Text to tokens and back, over the kinds of vocabulary there are."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from branchwise.runtime.errors import EngineError, ModelNotFound, RequestError
from branchwise.runtime.tokenizer import BYTE_OF_CHARACTER, Tokenizer

from .. import vocabularies
from ..vocabularies import LINES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SPELLINGS = ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<0x41>", "<", " ", "a", "\n", "é", "漢"]
ANY_TEXT = TEXT | st.lists(st.sampled_from(SPELLINGS), max_size=6).map("".join)


def save(folder: Path, backend: Backend, **options: Any) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def byte_level(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


@pytest.fixture(scope="module")
def unigram_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unigram")
    return vocabularies.save(vocabularies.unigram(), folder)


@pytest.fixture(scope="module")
def unigram(unigram_folder: Path) -> Tokenizer:
    return Tokenizer(unigram_folder)


def joined(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of a continuation as it is streamed."""
    stream = tokenizer.detokenizer()
    return "".join([*map(stream.push, tokens), stream.flush()])


# ---------------------------------------------------------------------------------------------- byte level


def test_byte_alphabet_is_the_one_of_tokenizers() -> None:
    assert set(BYTE_OF_CHARACTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))


@given(text=ANY_TEXT, at_start=st.booleans(), control=st.booleans())
def test_byte_level_text_comes_back(byte_level: Tokenizer, text: str, at_start: bool, control: bool) -> None:
    tokens = byte_level.encode(text, at_start=at_start, control=control)
    assert byte_level.decode(tokens) == text


@given(text=ANY_TEXT)
def test_text_that_is_data_never_becomes_a_control_token(byte_level: Tokenizer, text: str) -> None:
    tokens = byte_level.encode(text, at_start=False, control=False)
    assert not byte_level.special_ids & set(tokens)
    assert joined(byte_level, tokens) == text


@given(text=ANY_TEXT)
def test_tokens_at_the_start_are_those_of_transformers(byte_level: Tokenizer, tiny_tokenizer: Any, text: str) -> None:
    assert byte_level.encode(text, at_start=True, control=True) == tiny_tokenizer(text)["input_ids"]


def test_control_token_is_one_token_where_it_is_asked_for(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_end|>\n", at_start=False, control=True)[0] == 2
    assert len(byte_level.encode("<|im_end|>", at_start=False, control=False)) > 1


def test_empty_text_is_no_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.encode("", at_start=True, control=True) == []


def test_what_a_model_says_of_its_tokenizer(byte_level: Tokenizer) -> None:
    assert (byte_level.vocab_size, len(byte_level.token_bytes)) == (400, 400)
    assert (byte_level.bos_id, byte_level.eos_ids, byte_level.special_ids) == (1, {2}, {0, 1, 2})
    assert (byte_level.bos_token, byte_level.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert byte_level.chat_template is not None
    assert "<|im_start|>" in byte_level.chat_template
    assert [token for token, data in enumerate(byte_level.token_bytes) if not data] == [0, 1, 2]


def test_token_outside_the_vocabulary_is_named(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"^token id 400 is outside the vocabulary of 400 tokens\.$"):
        byte_level.decode([5, 400])


# ------------------------------------------------------------------------------------------- SentencePiece


def test_first_word_gets_its_space_only_at_the_start(unigram: Tokenizer) -> None:
    start = unigram.encode("to be", at_start=True, control=False)
    assert start[0] == unigram.bos_id == 1
    assert unigram.decode(start, at_start=True) == "<s>to be"
    assert joined(unigram, unigram.encode("to be", at_start=False, control=False)) == "to be"
    assert joined(unigram, unigram.encode(" to be", at_start=False, control=False)) == " to be"


@given(text=ANY_TEXT)
def test_sentencepiece_continuation_comes_back(unigram: Tokenizer, text: str) -> None:
    marked = text.replace("▁", " ")  # the mark is a space to such a vocabulary
    assert joined(unigram, unigram.encode(text, at_start=False, control=False)) == marked


@given(text=TEXT.filter(lambda text: text[:1] not in (" ", "▁")))
def test_sentencepiece_text_at_the_start_comes_back(unigram: Tokenizer, text: str) -> None:
    tokens = unigram.encode(text, at_start=True, control=False)
    assert unigram.decode(tokens, at_start=True) == "<s>" + text.replace("▁", " ")


@given(text=TEXT)
def test_sentencepiece_tokens_at_the_start_are_those_of_transformers(
    unigram: Tokenizer, unigram_folder: Path, text: str
) -> None:
    assert unigram.encode(text, at_start=True, control=True) == reference(unigram_folder)(text)["input_ids"]


@cache
def reference(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_bos_is_never_doubled(unigram: Tokenizer) -> None:
    assert unigram.encode("", at_start=True, control=True) == [1]
    assert unigram.encode("", at_start=True, control=True, bos=False) == []
    assert unigram.encode("<s>to be", at_start=True, control=True).count(1) == 1
    assert unigram.encode("<s>", at_start=True, control=False).count(1) == 1, "as data it is not a BOS"


def test_prepending_normalizer_leaves_continuations_alone(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, **{f"<0x{byte:02X}>": 5 + byte for byte in range(256)}}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(save(tmp_path, backend, unk_token="<unk>"))
    assert tokenizer.encode("a ab", at_start=True, control=False) == [4, 4, 3]
    assert tokenizer.encode("a ab", at_start=False, control=False) == [2, 4, 3]
    assert tokenizer.token_bytes[5 + 0xE9] == b"\xe9"
    assert tokenizer.decode([4, 4, 3], at_start=True) == "a ab"


# -------------------------------------------------------------------------------------------- odd folders


def test_every_end_token_counts_wherever_it_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    assert Tokenizer(folder).eos_ids == {0, 1, 2}
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder).eos_ids == {0, 2}


def test_vocabulary_has_the_models_size(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 448}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == 448
    assert tokenizer.token_bytes[400:] == [b""] * 48


def test_added_token_that_is_not_special_is_text(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<think é>", special=False)])
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 401}))
    grown = Tokenizer(folder)
    assert grown.token_bytes[400] == "<think é>".encode()
    assert joined(grown, [400]) == "<think é>"


def test_fingerprint_tells_vocabularies_apart(byte_level: Tokenizer, unigram: Tokenizer, tiny_model: Path) -> None:
    assert byte_level.fingerprint != unigram.fingerprint
    assert byte_level.fingerprint == Tokenizer(tiny_model).fingerprint


def test_vocabulary_without_exact_text_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(EngineError, match=r"^a WordLevel tokenizer with neither a byte-level nor"):
        Tokenizer(save(tmp_path, backend, unk_token="[UNK]"))


def test_a_model_may_have_neither_padding_nor_an_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, vocabularies.byte_level()))
    assert (tokenizer.eos_ids, tokenizer.bos_id) == (frozenset(), None)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("", "")
    assert joined(tokenizer, tokenizer.encode("to be", at_start=True, control=True)) == "to be"


def test_special_token_that_is_the_only_spelling_of_a_character_is_text(tmp_path: Path) -> None:
    backend = vocabularies.byte_level()
    backend.add_special_tokens(["~", "\u23ce"])
    tokenizer = Tokenizer(save(tmp_path, backend, eos_token="</s>"))
    (tilde,) = tokenizer.encode("~", at_start=False, control=True)
    (stop,) = tokenizer.encode("\u23ce", at_start=False, control=True)
    assert (tilde in tokenizer.special_ids, stop in tokenizer.special_ids) == (False, True)
    tokens = tokenizer.encode("a~\u23ce", at_start=False, control=False)
    assert joined(tokenizer, tokens) == "a~\u23ce"
    assert stop not in tokens


@pytest.mark.parametrize("kind", ["another mark", "ends of words"])
def test_vocabulary_that_is_spelled_in_an_unknown_way_is_refused(tmp_path: Path, kind: str) -> None:
    backend = vocabularies.byte_level()
    if kind == "another mark":
        backend = Backend(models.BPE(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_")
        backend.decoder = decoders.Metaspace(replacement="_")
        backend.train_from_iterator(LINES, trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False))
    else:
        backend = Backend(models.BPE(end_of_word_suffix="</w>"))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.BPEDecoder(suffix="</w>")
        backend.train_from_iterator(LINES, trainers.BpeTrainer(end_of_word_suffix="</w>", show_progress=False))
    with pytest.raises(EngineError, match=r"^the tokens of this BPE tokenizer do not spell their text: "):
        Tokenizer(save(tmp_path, backend))


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()], ids=str)
def test_vocabulary_that_changes_letters_is_taken(tmp_path: Path, normalizer: Any) -> None:
    backend = vocabularies.byte_level()
    backend.normalizer = normalizer
    tokenizer = Tokenizer(save(tmp_path, backend))
    assert joined(tokenizer, tokenizer.encode("to be", at_start=True, control=True)) == "to be"


def test_templates_by_name_are_told_apart(tiny_tokenizer: Any, tmp_path: Path) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    own = Tokenizer(tmp_path)
    assert own.tool_template == own.chat_template
    several = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    several.chat_template = {"default": "a", "tool_use": "b"}
    several.save_pretrained(tmp_path)
    assert (Tokenizer(tmp_path).chat_template, Tokenizer(tmp_path).tool_template) == ("a", "b")


def test_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no tokenizer can be loaded"):
        Tokenizer(tmp_path)


# ---------------------------------------------------------------------------------------- the demo model


def test_demo_model_reads_text_as_it_was_trained_to(demo_model: Path) -> None:
    tokenizer = Tokenizer(demo_model)
    assert tokenizer.encode("<|im_start|>", at_start=True, control=True) == [1]
    assert tokenizer.encode("<|im_end|>", at_start=True, control=True) == [2]
    assert tokenizer.encode("1234", at_start=False, control=False) == [33, 34, 35, 36], "digits stand alone"
    assert 2 in tokenizer.eos_ids
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


@given(text=ANY_TEXT)
def test_demo_model_text_comes_back(demo_model: Path, text: str) -> None:
    tokenizer = loaded(demo_model)
    assume(all(bytes([byte]) in tokenizer.token_bytes for byte in text.encode()))  # it lacks 21 bytes, and drops them
    for control in (True, False):
        assert tokenizer.decode(tokenizer.encode(text, at_start=True, control=control)) == text


@cache
def loaded(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


# ---------------------------------------------------------------------------------------- texts in several parts

WORDS = ["a", "the", "river", "12", " ", "  ", "isn't", "\n", ",", "é", "漢", "😀", "<|im_end|>", "</s>", "<0x41>"]
SEVERAL_WORDS = st.lists(st.sampled_from([*WORDS, *(f" {word}" for word in WORDS)]), max_size=14).map("".join)


def cut_between_words(text: str) -> list[str]:
    places = [0, *(match.start() for match in re.finditer("(?<=[A-Za-z])(?= [A-Za-z])", text)), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@pytest.fixture(scope="module", params=[vocabularies.byte_level, vocabularies.unigram])
def any_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(vocabularies.save(request.param(), tmp_path_factory.mktemp("kind")))


@given(text=SEVERAL_WORDS, at_start=st.booleans(), control=st.booleans())
def test_a_text_that_is_cut_between_words_has_the_tokens_of_its_parts(
    any_kind: Tokenizer, text: str, at_start: bool, control: bool
) -> None:
    assert any_kind.parts_at_words
    first, *rest = cut_between_words(text)
    tokens = any_kind.encode(first, at_start=at_start, control=control)
    for part in rest:
        tokens += any_kind.encode(part, at_start=False, control=control)
    assert tokens == any_kind.encode(text, at_start=at_start, control=control)


@pytest.mark.slow
@given(text=SEVERAL_WORDS)
def test_a_text_for_the_demo_model_has_the_tokens_of_its_parts(demo_model: Path, text: str) -> None:
    demo = _demo(demo_model)
    assert demo.parts_at_words
    parts = [demo.encode(part, at_start=False, control=True) for part in cut_between_words(text)]
    assert [token for part in parts for token in part] == demo.encode(text, at_start=False, control=True)


@cache
def _demo(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.mark.parametrize("spoilt", ["learned", "a token across words", "a control token of words", "stripped spaces"])
def test_a_text_is_not_cut_where_a_token_could_lie_across(tmp_path: Path, spoilt: str) -> None:
    backend = vocabularies.byte_level()
    if spoilt == "learned":
        backend = vocabularies.prepending()  # trained on whole lines
    elif spoilt == "a token across words":
        backend.add_tokens(["river runs"])
    elif spoilt == "a control token of words":
        backend.add_special_tokens(["<end of turn>"])
    else:
        backend.normalizer = normalizers.Strip()
    assert not Tokenizer(vocabularies.save(backend, tmp_path)).parts_at_words
