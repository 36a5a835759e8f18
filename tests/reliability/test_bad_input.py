"""Files, templates and patterns from strangers: each is a clear error or does no harm, before the test times out."""

from __future__ import annotations

import json
import re
import resource
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from branchwise.interpreter.chat import ChatTemplate, Turn
from branchwise.interpreter.errors import ChatError
from branchwise.runtime import CacheError, ConstraintError, Engine, saved
from branchwise.runtime.errors import ModelNotFound, WeightsError
from branchwise.runtime.models import check_folder, resolve, weight_map

PROMPT = list(range(10, 40))
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, num_slots=512) as engine:
        wanted = answer(engine)
        engine.generate([5, 6, 7], max_tokens=4, cache_salt="a")
        yield engine
        engine.check()
        assert answer(engine) == wanted


def answer(engine: Engine) -> tuple[int, ...]:
    return engine.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).tokens


@pytest.fixture(scope="module")
def cache(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("cache") / "cache"
    engine.save_cache(file)
    return file.read_bytes()


# -------------------------------------------------------------------------------------------------------- saved caches


def spoilt(data: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    changed = bytearray(data)
    for place, value in edits:
        changed[place % len(changed)] = value
    return bytes(changed[: len(changed) - cut])


EDITS = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=4)


@MANY
@given(edits=EDITS, early=st.booleans(), cut=st.integers(0, 3000))
@example(edits=[(7, 255)], early=True, cut=0)
def test_a_cache_with_other_bytes_is_refused_or_the_same(
    edits: list[tuple[int, int]], early: bool, cut: int, engine: Engine, cache: bytes, tmp_path: Path
) -> None:
    """`early`: in the header, which says what the rest is."""
    file = tmp_path / "cache"
    file.write_bytes(spoilt(cache, [(place % 800 if early else place, value) for place, value in edits], cut))
    with suppress(CacheError):
        engine.load_cache(file)


FORGED: dict[str, tuple[dict[str, Any], str | None]] = {
    "namespaces that are no list": ({}, '"a"'),
    "namespaces that are no JSON": ({}, "{"),
    "namespaces of numbers": ({}, "[1, {}]"),
    "too few namespaces": ({}, "[]"),
    "nodes in floats": ({"nodes": torch.zeros(1, 4)}, None),
    "nodes of three numbers": ({"nodes": torch.zeros(1, 3, dtype=torch.int64)}, None),
    "nodes without rows": ({"nodes": torch.tensor(1)}, None),
    "a node that is its own parent": ({"nodes": torch.tensor([[0, 2, 0, 0]])}, None),
    "a node of a negative length": ({"nodes": torch.tensor([[-1, -5, 0, 0]])}, None),
    "a node longer than the file": ({"nodes": torch.tensor([[-1, 1 << 60, 0, 0]])}, None),
    "tokens in 64 bits": ({"tokens": torch.zeros(2, dtype=torch.int64)}, None),
    "tokens outside of the vocabulary": (
        {"tokens": torch.tensor([5, 400], dtype=torch.int32), "nodes": torch.tensor([[-1, 2, 0, 0]])},
        None,
    ),
    "keys of another dtype": ({"kv": torch.zeros(2, 3, dtype=torch.float64)}, None),
    "keys of another width": ({"kv": torch.zeros(2, 3)}, None),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_cache_whose_checksum_is_right_is_refused(
    what: str, engine: Engine, cache: bytes, tmp_path: Path
) -> None:
    from safetensors import safe_open

    file = tmp_path / "cache"
    file.write_bytes(cache)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    changes, namespaces = FORGED[what]
    tensors = {**load_file(file), **changes}
    metadata["namespaces"] = metadata["namespaces"] if namespaces is None else namespaces
    metadata["checksum"] = saved._checksum(tensors, metadata["namespaces"])
    save_file(tensors, file, metadata)
    used = engine.stats.free_slots
    with pytest.raises(CacheError, match="is not a cache that save_cache wrote"):
        engine.load_cache(file)
    assert engine.stats.free_slots == used


# ------------------------------------------------------------------------------------------------------------- weights


@MANY
@given(edits=EDITS, cut=st.integers(0, 3000))
def test_weights_with_other_bytes_in_their_header_are_refused_or_read(
    edits: list[tuple[int, int]], cut: int, tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))  # a file that is in use must not be written to
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = (tiny_model / "model.safetensors").read_bytes()
    changed = spoilt(data, [(place % 2000, value) for place, value in edits], cut)
    (folder / "model.safetensors").write_bytes(changed)
    with suppress(WeightsError, ModelNotFound):
        Engine(folder, num_slots=32).close()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b", "..", ""])
def test_an_index_leads_to_no_file_outside_of_its_folder(name: str, tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    names = load_file(tiny_model / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
    for read in (weight_map, check_folder):
        with pytest.raises(WeightsError, match=re.escape(repr(name))):
            read(tmp_path)


GGUF_HEADERS = {
    "no version": b"GGUF",
    "a version of its own": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "more tensors than bytes": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    "more fields than bytes": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
    "a name without an end": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50) + b"general",
    "an array without an end": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 50),
    "nothing": b"",
    "nothing in it": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("what", GGUF_HEADERS)
def test_a_hostile_gguf_is_refused_soon_and_takes_no_memory(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(GGUF_HEADERS[what])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((WeightsError, ModelNotFound), match=r"model\.gguf"):
        resolve(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 500_000  # KiB
    assert not list(tmp_path.glob("cache/models/*"))


# ----------------------------------------------------------------------------------------------------------- templates

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ messages.__class__.__base__ }}",
    "{{ (messages | attr('__class__')).__name__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['os'] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ range(10000000) | list }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_reaches_nothing_but_its_conversation(escape: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}" + escape, bos_token="", eos_token="")
    turn = Turn("user", "hello", False, {})
    try:
        text = template.render([turn])
    except ChatError:
        text = ""
    assert not re.search(r"class|module|uid=|root:|function|\bos\b", text.replace("hello", ""))
    assert turn.content == "hello"


# --------------------------------------------------------------------------------------------------- patterns, schemas

PATTERN = st.text(alphabet="ab01()[]{}|*+?.^$\\-,:<>=! é\u0000\U0001f600", max_size=24)


@MANY
@given(pattern=PATTERN)
@example(pattern="(a|aa)+" * 8)
@example(pattern="((a{1,99}){1,99}){1,99}")
@example(pattern="(" * 5000 + ")" * 5000)
@example(pattern="[" + "a-z" * 4000 + "]{0,50000}")
def test_any_pattern_is_compiled_or_refused_soon(pattern: str, engine: Engine) -> None:
    with suppress(ConstraintError):
        engine.generate([5], regex=pattern, max_tokens=3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "properties", "items", "anyOf", "$ref", "enum", "pattern", "minItems", "const", "a"]),
        inner | st.sampled_from(["object", "array", "string", "integer", "#", "#/a", "(", "http://x/y"]),
        max_size=4,
    ),
    max_leaves=10,
)


@MANY
@given(schema=JSON)
@example(schema={"$ref": "#"})
@example(schema={"type": "array", "minItems": 10**9})
@example(schema={"allOf": [{"$ref": "#"}, {"$ref": "#"}]})
@example(schema={"type": "string", "pattern": "(a{1,999}){1,999}"})
@example(schema={"enum": [str(i) for i in range(20_000)]})
def test_any_schema_is_compiled_or_refused_soon(schema: Any, engine: Engine) -> None:
    with suppress(ConstraintError):
        engine.generate([5], json_schema=json.dumps(schema), max_tokens=3)
