import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.analysis.entries import Entries, entries_of
from clearhead.analysis.examples import CATEGORIES, ExampleCollector
from clearhead.dictionaries.lorsa import Codes
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.ops.hash_rng import mix

UNITS, BLOCKS, CONTEXT = 7, 12, 10


def dense_activations(seed, density=0.4, levels=None):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(BLOCKS * CONTEXT, UNITS)).astype(np.float32)
    if levels:
        values = np.round(values * levels) / levels  # many equal magnitudes, to test ties
    values[rng.random(values.shape) > density] = 0
    values[:, 5] = 0  # a dead unit
    values[:, 6] = np.where(values[:, 6] == 0, 1, values[:, 6])  # one that is always active
    values.reshape(BLOCKS, CONTEXT, UNITS)[:, 0] = 0  # position 0 is left out
    return values


def entries(values, low, high):
    token, unit = np.nonzero(values[low:high])
    return Entries(unit, token + low, values[low:high][token, unit])


def collect(values, cuts, **options):
    collector = ExampleCollector(UNITS, BLOCKS, CONTEXT, **options)
    for low, high in zip([0, *cuts], [*cuts, len(values)], strict=True):
        collector.update(entries(values, low, high))
    return collector.choose()


def brute_force(values, *, top, quantiles, negatives, seed):
    """The definition, unit by unit, over all activations at once."""
    rows = []
    for unit in range(UNITS):
        active = [int(t) for t in np.flatnonzero(values[:, unit])]
        by_size = sorted(active, key=lambda t: (-abs(values[t, unit]), t))
        best = by_size[:top]
        rows += [(unit, "top", rank, t) for rank, t in enumerate(best)]

        hashed = {t: int(mix(seed, 1, np.int64(unit), np.int64(t))[0]) >> 32 for t in active}
        sample = sorted(active, key=lambda t: (hashed[t], t))[: 4 * quantiles]
        rest = [t for t in by_size if t in sample and t not in best]
        bands = [[t for i, t in enumerate(rest) if i * quantiles // len(rest) == band] for band in range(quantiles)]
        picked = [min(band, key=lambda t: (hashed[t], t)) for band in bands if band]
        rows += [(unit, "quantile", rank, t) for rank, t in enumerate(picked)]

        drawn = []
        for draw in range(4 * negatives):
            place = int(mix(seed, 2, np.int64(unit), np.int64(draw))[0]) % (BLOCKS * (CONTEXT - 1))
            token = place // (CONTEXT - 1) * CONTEXT + place % (CONTEXT - 1) + 1
            if token not in drawn and values[token, unit] == 0:
                drawn.append(token)
        rows += [(unit, "negative", rank, t) for rank, t in enumerate(drawn[:negatives])]
    return rows


def as_rows(chosen):
    return [
        (int(u), CATEGORIES[c], int(r), int(t))
        for u, c, r, t in zip(chosen.unit, chosen.category, chosen.rank, chosen.token, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, BLOCKS * CONTEXT), max_size=6).map(sorted),
    st.sampled_from([None, 2]),
    st.sampled_from([(16, 8, 4), (3, 5, 2), (1, 0, 0), (40, 3, 9)]),
)
def test_streaming_equals_brute_force_however_the_data_are_cut(seed, cuts, levels, sizes):
    values = dense_activations(seed, levels=levels)
    options = dict(zip(("top", "quantiles", "negatives"), sizes, strict=True)) | {"seed": seed}
    chosen = collect(values, cuts, **options)
    assert as_rows(chosen) == brute_force(values, **options)
    np.testing.assert_array_equal(chosen.value, values[chosen.token, chosen.unit])


def test_order_of_batches_does_not_matter():
    values = dense_activations(3, levels=2)
    forward, backward = (ExampleCollector(UNITS, BLOCKS, CONTEXT, seed=1) for _ in range(2))
    cuts = [(0, 30), (30, 70), (70, 120)]
    for low, high in cuts:
        forward.update(entries(values, low, high))
    for low, high in reversed(cuts):
        backward.update(entries(values, low, high))
    assert as_rows(forward.choose()) == as_rows(backward.choose())


def test_the_seed_decides_the_random_ones():
    values = dense_activations(0)
    first, again, other = (as_rows(collect(values, [], top=2, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert [row for row in first if row[1] == "top"] == [row for row in other if row[1] == "top"]
    assert first != other


def test_dead_units_have_no_examples_and_position_0_is_never_a_negative():
    chosen = collect(dense_activations(0), [], negatives=9)
    assert set(chosen.category[chosen.unit == 5]) == {CATEGORIES.index("negative")}
    assert (chosen.token % CONTEXT > 0).all()


def test_the_sample_of_active_tokens_is_uniform():
    """Over many units with the same activations, every token is sampled about equally often."""
    n_units, n_tokens = 4000, 40
    collector = ExampleCollector(n_units, 1, n_tokens, top=1, quantiles=2, seed=5)
    unit, token = np.divmod(np.arange(n_units * n_tokens), n_tokens)
    collector.update(Entries(unit, token, np.ones(len(unit), dtype=np.float32)))
    counts = np.bincount(collector.sample.token.ravel(), minlength=n_tokens)
    expected = n_units * 8 / n_tokens
    assert counts.sum() == n_units * 8
    # six standard deviations of a count
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_entries_of_codes():
    values = torch.tensor([[[1.0, 0.0], [2.0, -3.0]], [[0.0, 0.0], [0.0, 4.0]]])
    heads = torch.tensor([[[3, 0], [1, 2]], [[0, 1], [0, 6]]])
    found = entries_of(Codes(values, heads), np.array([5, 9]))
    assert found.unit.tolist() == [3, 1, 2, 6]
    assert found.token.tolist() == [10, 11, 11, 19]
    assert found.value.tolist() == [1, 2, -3, 4]
    assert entries_of(Codes(values, heads), np.array([5, 9]), first=1).token.tolist() == [11, 11, 19]
    values[1, 0, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="block 9 at position 0"):
        entries_of(Codes(values, heads), np.array([5, 9]))


def test_bad_sizes():
    with pytest.raises(ClearheadError, match="top must be 1 or more"):
        ExampleCollector(UNITS, BLOCKS, CONTEXT, top=0)
    with pytest.raises(ClearheadError, match="negatives must be 0 or more"):
        ExampleCollector(UNITS, BLOCKS, CONTEXT, negatives=-1)
    with pytest.raises(ClearheadError, match="no position is left"):
        ExampleCollector(UNITS, BLOCKS, 1)
