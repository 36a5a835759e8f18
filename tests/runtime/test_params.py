"""The options of a generation and of an engine: what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from branchwise.runtime.config import EngineConfig, check_memory, engine_config
from branchwise.runtime.constrain import Choices, Regex
from branchwise.runtime.errors import OutOfSlots, RequestError
from branchwise.runtime.params import GenerateParams, generate_params

WHOLE = "{} must be a whole number, got {}."
WHOLE_OR_NONE = "{} must be a whole number, or None, got {}."
AT_LEAST_1 = "{} must be at least 1, got {}"
NUMBER = "{} must be a number, got {}."
STRING_OR_NONE = "{} must be a string, or None, got {}."
STRINGS = "{} must be a list of strings, got {}."


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("max_tokens", value, WHOLE) for value in (1.5, None, True, "3")),
        *(("max_tokens", value, AT_LEAST_1 + ". To score given text, use score().") for value in (0, -1)),
        *(("temperature", value, NUMBER) for value in ("1", None, True)),
        *(("temperature", value, "{} must be 0 or more, got {}.") for value in (float("nan"), float("inf"), -0.1)),
        *(("top_p", value, NUMBER) for value in ("1", None)),
        *(("top_p", value, "{} must be in (0, 1], got {}.") for value in (0, 1.1, float("nan"))),
        *(("top_k", value, WHOLE_OR_NONE) for value in (1.5, "1", False)),
        ("top_k", 0, AT_LEAST_1 + "; None turns it off."),
        *(("seed", value, WHOLE_OR_NONE) for value in (1.5, "1", True, [])),
        *(("stop", value, STRINGS) for value in (5, b"x", True)),
        ("stop", ["a", 1], "{}[1] must be a string, got 1."),
        *(("choices", value, STRINGS) for value in ("yes", 5, b"yes")),
        ("choices", [], "{} must be at least one string, got none. None turns it off."),
        ("choices", [1], "{}[0] must be a string, got 1."),
        ("ignore_eos", 1, "{} must be True or False, got {}."),
        ("regex", 5, STRING_OR_NONE),
        ("cache_salt", 5, STRING_OR_NONE),
        ("routing_key", b"x", STRING_OR_NONE),
        *(("priority", value, WHOLE) for value in (None, "high", 1.5, True)),
        *(("timeout_s", value, "{} must be more than 0, got {}.") for value in (0, -1, float("nan"))),
        *(("timeout_s", value, "{} must be a number, or None, got {}.") for value in ("1", True)),
        ("max_tokens", "9" * 100, f"{{}} must be a whole number, got '{'9' * 56}...."),
    ],
)
def test_an_option_with_a_value_it_cannot_have_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        generate_params(**{name: value})
    assert str(raised.value) == message.format(name, repr(value))


def test_an_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(RequestError) as raised:
        generate_params(max_token=5)
    assert str(raised.value) == "there is no option max_token. Did you mean max_tokens?"
    with pytest.raises(RequestError, match=r"^there is no option zzz\. Known: cache_salt, choices, .*, top_p\.$"):
        generate_params(zzz=5)
    with pytest.raises(RequestError, match=r"^Engine: there is no option num_slot\. Did you mean num_slots\?$"):
        engine_config(num_slot=5)


def test_strings_and_lists_become_tuples() -> None:
    assert generate_params(stop="x").stop == ("x",)
    assert generate_params(stop=None).stop == ()
    assert generate_params(stop=["x", "yz"]).stop == ("x", "yz")
    params = generate_params(choices=iter(["yes", "no"]))
    assert params.choices == ("yes", "no")
    assert params.constraint() == Choices(("yes", "no"))
    assert generate_params(regex="a+").constraint() == Regex("a+")
    hash(GenerateParams(stop=["x"], choices=["a"]))  # type: ignore[arg-type]  # as callers may


def test_a_regex_and_choices_exclude_each_other() -> None:
    with pytest.raises(RequestError, match=r"^regex and choices exclude each other\.$"):
        generate_params(regex="a", choices=["a"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: None}, f"{name} must be a positive integer, got None.") for name in ("num_slots", "page_size")),
        ({"page_size": "auto"}, "page_size must be a positive integer, got 'auto'."),
        ({"num_slots": 0}, "num_slots must be a positive integer, got 0."),
        ({"num_slots": 1.5}, "num_slots must be a positive integer, got 1.5."),
        ({"num_slots": "many"}, "num_slots must be a positive integer, got 'many'."),
        ({"num_slots": []}, "num_slots must be a positive integer, got []."),
        ({"max_running": None}, "max_running must be a positive integer, got None."),
        ({"context_length": "auto"}, "context_length must be a positive integer, got 'auto'."),
        ({"seed": []}, "seed must be a whole number, or None, got []."),
        ({"device": 3.5}, 'device must be a name like "cpu" or "cuda:0", or None, got 3.5.'),
        ({"dtype": []}, "dtype must be one of auto, fastest, float32, bfloat16, float16, got []."),
        ({"eviction": []}, "eviction must be one of "),
        ({"policy": {}}, "policy must be one of "),
        ({"disk_cache_path": 5, "disk_cache_bytes": 5}, "disk_cache_path must be a path, or None, got 5."),
        ({"host_cache_bytes": 1.5}, "host_cache_bytes must be 0 or a number of bytes, got 1.5."),
    ],
)
def test_an_engine_option_with_a_value_it_cannot_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        engine_config(**options)
    assert str(raised.value).startswith(f"Engine: {message}")
    assert message.endswith(" ") or str(raised.value) == f"Engine: {message}"


def test_a_device_may_be_given_as_torch_has_it() -> None:
    cpu = torch.device("cpu")
    assert engine_config(device=cpu).torch_device() == EngineConfig(device="cpu").torch_device() == cpu


def test_a_cache_larger_than_all_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("branchwise.runtime.config.total_bytes", lambda device: 8 << 30)
    monkeypatch.setattr("branchwise.runtime.config.free_bytes", lambda device: 3 << 30)
    check_memory(1 << 20, 8192, cpu)
    with pytest.raises(RequestError) as raised:
        check_memory(10**13, 1024, cpu)
    assert str(raised.value) == (
        "Engine: num_slots 10,000,000,000,000 needs 9,536,743.2 GiB for keys and values, and cpu has 8.0 GiB, "
        '3.0 GiB of it free. Lower num_slots, or leave it at "auto".'
    )


def test_memory_is_that_of_this_machine() -> None:
    with pytest.raises(RequestError, match=r"^Engine: num_slots .* needs .* GiB for keys and values, and cpu has "):
        check_memory(10**13, 1024, torch.device("cpu"))


def test_a_prompt_without_room_is_told_to_become_shorter() -> None:
    assert str(OutOfSlots(wanted=70, free=64, total=64, prompt_alone=True)) == (
        "the request needs 70 slots, 64 are free. Raise num_slots (64) or shorten the prompt."
    )
    assert str(OutOfSlots(wanted=70, free=60, evictable=4, total=64, who="request 7")) == (
        "request 7 needs 70 slots, 60 are free and 4 evictable. Raise num_slots (64) or lower max_tokens."
    )
