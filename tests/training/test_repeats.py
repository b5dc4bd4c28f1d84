"""Losses on repeated tokens, of a model that knows exactly what can be known."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from clearhead.data.repeats import repeated_sequences
from clearhead.training.repeats import measure_induction, next_token_losses

N_TOKENS = 5000


class Copier(nn.Module):
    """Predicts, with certainty, what followed the last occurrence of the present token, else uniformly."""

    device = torch.device("cpu")

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, N_TOKENS)
        for row, out in zip(input_ids.tolist(), logits, strict=True):
            for i, token in enumerate(row):
                before = [j for j in range(i) if row[j] == token]
                if before:
                    out[i, row[before[-1] + 1]] = 1000.0
        return SimpleNamespace(logits=logits)


def test_induction_is_measured_where_it_can_be_known():
    alphabet = torch.arange(N_TOKENS)
    period = repeated_sequences(-1, torch.arange(16), 18, alphabet, period=9)[:, :9]
    assert all(len(set(row)) == 9 for row in period.tolist())  # no chance repetition, so the copier never errs
    first, second = measure_induction(Copier(), alphabet, 18, 16)
    assert first == pytest.approx(math.log(N_TOKENS), rel=1e-6) and second == 0
    # one prediction earlier, nothing says that a repetition begins
    losses = next_token_losses(Copier(), torch.cat([period, period], 1))
    assert torch.allclose(losses[:, 8], torch.tensor(math.log(N_TOKENS))) and losses.shape == (16, 17)
