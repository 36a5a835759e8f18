"""Products of small matrices, against numpy's, for every width that lanes can have."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from branchwise.runtime.attention import tiles

D, BLOCK, LANES = 12, 8, 112


def compiled(product: Any) -> Any:
    def run(result: Any, left: Any, right: Any, count: Any, used: Any) -> None:
        product(result, left, right, count, used)

    return numba.njit(run)


@pytest.mark.parametrize("vectors", [1, 3])
def test_they_are_products(monkeypatch: pytest.MonkeyPatch, vectors: int) -> None:
    monkeypatch.setattr(tiles, "widest", lambda: vectors)
    multiply, add = map(compiled, tiles.products(D, BLOCK, LANES))
    rng = np.random.default_rng(0)
    for used in range(16, LANES + 1, 16):
        for count in (4, 8):
            keys, queries = rng.standard_normal((BLOCK, D), "f4"), rng.standard_normal((D, LANES), "f4")
            scores = np.full((BLOCK, LANES), 7, np.float32)
            multiply(scores, keys, queries, count, used)
            np.testing.assert_allclose(scores[:count, :used], (keys @ queries)[:count, :used], rtol=1e-4, atol=1e-5)
            assert (scores[count:] == 7).all() and (scores[:, used:] == 7).all()
            output = rng.standard_normal((D, LANES), "f4")
            expected = output.copy()
            expected[:, :used] += keys[:count].T @ scores[:count, :used]
            add(output, keys, scores, count, used)
            np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)
