"""The kinds of vocabulary there are, trained on a few lines."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = ["to be or not to be that is the question", "good morning all of you", "the river runs past the mill"] * 4
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """A byte-level BPE."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    return backend


def unigram() -> Tokenizer:
    """SentencePiece's way: words begin with a mark, the first one too; what is not in it is spelled in bytes."""
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(LINES, trainer)
    vocab = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    vocab += [(spelled, -20.0) for spelled in BYTES]
    backend = Tokenizer(models.Unigram(vocab, 0, True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_bos(backend)


def prepending() -> Tokenizer:
    """A BPE over characters with bytes to fall back on, whose normalizer writes the mark of the first word."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=SPECIALS, show_progress=False)
    trained.train_from_iterator(LINES, trainer)
    learned = json.loads(trained.to_str())["model"]
    vocab = learned["vocab"] | {spelled: len(learned["vocab"]) + at for at, spelled in enumerate(BYTES)}
    merges = [tuple(merge) for merge in learned["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_bos(backend)


def _with_bos(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens(SPECIALS)
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", special_tokens=[("<s>", 1)])
    return backend


def save(backend: Tokenizer, folder: Path) -> Path:
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder
