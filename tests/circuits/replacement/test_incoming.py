"""Edges between groups of units are the sums of those between their members."""

import torch

from clearhead.circuits.replacement.incoming import Incoming
from clearhead.units import Unit


def test_an_edge_between_groups_is_the_sum_of_the_edges_between_members():
    generator = torch.Generator().manual_seed(0)
    sources, targets = [[Unit("lorsa", layer, n) for n in range(6)] for layer in range(2)]
    weight = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    order = torch.randperm(6, generator=generator).tolist()
    block = Incoming([sources[n] for n in order], targets, weight)
    summed = block.summed(lambda unit: Unit("head", unit.layer, (unit.index or 0) % 3))
    assert summed.sources == [Unit("head", 0, p) for p in dict.fromkeys(n % 3 for n in order)]
    assert summed.targets == [Unit("head", 1, p) for p in range(3)]
    for row, source in enumerate(summed.sources):
        for column, target in enumerate(summed.targets):
            members = [
                (r, c) for r, n in enumerate(order) for c in range(6) if (n % 3, c % 3) == (source.index, target.index)
            ]
            expected = sum(float(weight[member]) for member in members)
            assert len(members) == 4 and abs(float(summed.weight[row, column]) - expected) < 1e-12


def test_a_unit_that_is_its_own_group_keeps_its_edges():
    units = [Unit("input"), Unit("positions")]
    weight = torch.tensor([[1.0], [2.0]])
    same = Incoming(units, [Unit("mlp", 0)], weight).summed(lambda unit: unit)
    assert same.sources == units and torch.equal(same.weight, weight)
