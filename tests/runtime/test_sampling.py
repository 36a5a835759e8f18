import dataclasses

import pytest
import torch

from branchwise.runtime.sampling import SamplingParams, gumbel, noise_bits, noise_key, sample

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, -30.0])


def draws(count: int, logits: torch.Tensor = LOGITS, **options: object) -> list[int]:
    params = SamplingParams(**options)  # type: ignore[arg-type]  # options of mixed kinds
    return [sample(logits, params, position) for position in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4])
def test_low_temperatures_take_the_likeliest(temperature: float) -> None:
    assert set(draws(50, temperature=temperature)) == {4}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_are_drawn_with_their_probabilities(temperature: float) -> None:
    count = 20_000
    found = torch.bincount(torch.tensor(draws(count, temperature=temperature, seed=5)), minlength=6).double()
    expected = (LOGITS.double() / temperature).softmax(-1) * count
    chi_square = ((found - expected)[:5] ** 2 / expected[:5]).sum()
    assert chi_square < 23.5  # p = 0.0001 for 4 degrees of freedom
    assert found[5] == 0


def test_the_noise_is_uniform_over_a_large_vocabulary() -> None:
    noise = gumbel(torch.arange(50_000), SamplingParams(seed=1), 7)
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    distance = (uniform - (torch.arange(50_000).double() + 0.5) / 50_000).abs().max()
    assert distance < 0.0098  # Kolmogorov-Smirnov, p = 0.0001


def test_a_draw_depends_on_seed_path_sample_and_position_alone() -> None:
    params = SamplingParams(seed=3)
    logits = torch.zeros(50_000)
    base = sample(logits, params, 10)
    assert sample(logits, params, 10) == base
    others = [
        sample(logits, params, 11),
        *(
            sample(logits, dataclasses.replace(params, **change), 10)
            for change in ({"seed": 4}, {"path": (0,)}, {"sample": 1})
        ),
        sample(logits, dataclasses.replace(params, path=(0, 1)), 10),
    ]
    assert len({base, *others}) == 6


def test_top_k_and_top_p_keep_the_likeliest_only() -> None:
    assert set(draws(400, temperature=5.0, top_k=2)) == {4, 0}
    assert set(draws(400, temperature=1.0, top_p=0.6)) == {4}  # 4 alone has 0.64
    assert set(draws(400, temperature=1.0, top_p=0.7)) == {4, 0}
    assert set(draws(400, temperature=1.0, top_p=1e-6)) == {4}
    assert set(draws(400, temperature=1.0, top_k=10**9)) <= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4, 0.01, 1.0, 100.0])
def test_what_is_not_allowed_is_never_drawn(temperature: float) -> None:
    allowed = torch.tensor([False, False, True, True, False, True])
    params = SamplingParams(temperature=temperature)
    assert {sample(LOGITS.masked_fill(~allowed, -torch.inf), params, position) for position in range(200)} <= {2, 3, 5}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_a_draw_from_a_large_vocabulary_is_the_argmax_over_all_of_it(temperature: float, spread: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50_000) * spread
    everyone = torch.arange(50_000)
    for position in range(30):
        params = SamplingParams(temperature=temperature, seed=9)
        sums = logits.double() / temperature + gumbel(everyone, params, position)
        assert sample(logits, params, position) == int(sums.argmax())


@pytest.mark.parametrize("top_k", [None, 50, 1500])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
@pytest.mark.parametrize("spread", [0.2, 4.0])
def test_truncation_keeps_the_same_tokens_whatever_is_looked_at_first(
    top_k: int | None, top_p: float, spread: float
) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5_000) * spread
    values, order = logits.double().sort(descending=True)
    values = values[:top_k]
    before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
    allowed = set(order[: int((before < top_p).sum())].tolist())
    found = draws(300, logits, top_k=top_k, top_p=top_p, seed=4)
    assert set(found) <= allowed
    assert len(set(found)) > min(len(allowed), 300) * 0.2


def test_the_noise_of_a_draw_is_what_it_always_was() -> None:
    bits = noise_bits(torch.arange(4), *noise_key(SamplingParams(seed=1, path=(2,), sample=3), 5))
    assert bits.tolist() == PINNED


PINNED = [790346138, 1315389973, 781738785, 1633258092]
