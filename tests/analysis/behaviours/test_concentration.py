import torch

from clearhead.analysis.behaviours.behaviour import Probe
from clearhead.analysis.behaviours.concentration import concentration
from clearhead.analysis.behaviours.tally import tally
from tests.analysis.behaviours.test_tally import reading_of


def test_a_unit_of_one_token_is_concentrated_and_one_of_any_token_is_not():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(60, (40, 30), generator=generator)
    expected = torch.ones(30, 30, dtype=torch.bool).tril(-1).expand(40, 30, 30)
    probe = Probe("hand", (tokens,), (expected,))
    rows = []
    for block, key in (tokens == 7).nonzero().tolist():
        if key < 29:
            rows.append((0, block, 29, torch.eye(30)[key].tolist()))
    for place in torch.randperm(40 * 29, generator=generator)[:60].tolist():
        block, query = place // 29, 1 + place % 29
        rows.append((1, block, query, torch.eye(30)[int(torch.randint(query, (), generator=generator))].tolist()))
    reading = reading_of(rows, 3, tokens)
    few = concentration(probe, [reading], tally(probe, [reading]))
    assert few[0] > 0.9 and few[1] < 0.2 and few[2] == 0
