import torch

from clearhead.analysis.behaviours.probe_text import PERIODS, said_again


def test_a_piece_of_the_block_comes_again_and_again():
    blocks = torch.arange(6 * 128).view(6, 128)
    again = said_again(blocks, 0)
    periods = []
    for block, row in zip(blocks, again, strict=True):
        assert row[0] == block[0]
        period = int((row[2:] == row[1]).nonzero()[0, 0]) + 1
        assert torch.equal(row[1 + period :], row[1 : len(row) - period])
        assert row[1] > 0 and torch.equal(row[1 : 1 + period], row[1] + torch.arange(period))
        assert set(row.tolist()) <= set(block.tolist())
        periods.append(period)
    assert set(periods) <= set(PERIODS) and len(set(periods)) > 2


def test_short_blocks_have_short_pieces():
    again = said_again(torch.arange(2 * 32).view(2, 32), 1)
    assert all(len(set(row[1:].tolist())) <= PERIODS[-1] // 4 for row in again)
