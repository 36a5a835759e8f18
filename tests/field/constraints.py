"""What a constraint lets through, without a model: over single bytes, and over the tiny model's own tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable

from branchwise.interpreter.local import generate_params
from branchwise.lang import Gen, gen
from branchwise.runtime.constrain import Compiler, Constraint, Vocab

END = 256
BYTES = Vocab([*(bytes([byte]) for byte in range(256)), b""], [], [END])


def constraint_of(**options: object) -> Constraint:
    """What `gen(**options)` is held to."""
    op = gen("x", **options)  # type: ignore[arg-type]
    assert isinstance(op, Gen)
    compiler = Compiler(BYTES)
    spec = generate_params(op).constraint()
    assert spec is not None
    try:
        return compiler.compile(spec).result(timeout=60)
    finally:
        compiler.close()


def ok(constraint: Constraint, text: str) -> bool:
    """Whether the text can be written in full."""
    state = constraint.start()
    return all(state.advance(byte) for byte in text.encode()) and state.is_complete


def closed(**properties: object) -> dict[str, object]:
    """An object of these members, all required, and no others."""
    required: Iterable[str] = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def spaced(text: str) -> str:
    """JSON as it is written here: one space after each comma and colon."""
    return json.dumps(json.loads(text), ensure_ascii=False)
