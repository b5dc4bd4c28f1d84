import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.order import indices
from clearhead.errors import ClearheadError

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**40)


@given(seed=seeds, n=sizes, batch=st.integers(1, 17), epochs=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_epoch_holds_every_block_once(seed, n, batch, epochs):
    steps = -(-epochs * n // batch)
    stream = torch.cat([indices(seed, step, batch, n) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))


@given(seed=seeds, n=sizes, step=st.integers(0, 50), share=st.integers(1, 5), world=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_processes_together_read_what_one_reads(seed, n, step, share, world):
    batch = share * world
    parts = [indices(seed, step, batch, n, rank, world) for rank in range(world)]
    assert torch.equal(torch.stack(parts, dim=1).flatten(), indices(seed, step, batch, n))


@given(seed=seeds, step=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_step_depends_on_nothing_but_seed_and_step(seed, step):
    expected = indices(seed, step, 4, 50)
    indices(seed + 1, 3, 4, 50)
    indices(seed, 0, 7, 13)
    assert torch.equal(indices(seed, step, 4, 50), expected)


def test_epochs_and_seeds_are_shuffled_anew():
    first, second = indices(0, 0, 100, 100), indices(0, 1, 100, 100)
    other = indices(1, 0, 100, 100)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert not torch.equal(first, torch.arange(100))


def test_the_order_is_pinned():
    # a change here silently changes every run that is resumed: do not update it, restore the order
    assert indices(0, 0, 8, 20).tolist() == [15, 0, 11, 9, 1, 6, 3, 5]


def test_blocks_are_spread_evenly_over_places():
    # mean place of each block over many epochs: 49.5 ± 5 standard errors of a uniform place
    places = np.stack([np.argsort(indices(7, epoch, 100, 100).numpy()) for epoch in range(400)])
    assert np.abs(places.mean(0) - 49.5).max() < 5 * np.sqrt((100**2 - 1) / 12 / 400)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": -1, "batch": 4, "n": 10}, "step -1"),
        ({"step": 0, "batch": 4, "n": 0}, "0 blocks"),
        ({"step": 0, "batch": 0, "n": 10}, "batch 0"),
        ({"step": 0, "batch": 4, "n": 10, "rank": 2, "world": 2}, "rank 2 of 2"),
        ({"step": 0, "batch": 5, "n": 10, "rank": 0, "world": 2}, "take 4 or 6 blocks"),
    ],
)
def test_impossible_orders_are_refused(arguments, words):
    with pytest.raises(ClearheadError, match=words):
        indices(0, **arguments)
