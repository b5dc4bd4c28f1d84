"""Random tokens that repeat: by their definition; and a text of which they are a share."""

import pytest
import torch

from clearhead.data.repeats import MIXED_SEEDS, NAME, alphabet_of, mixed_blocks, repeated_sequences
from clearhead.data.text import token_blocks

ALPHABET = torch.arange(3, 50)


def test_a_repeated_sequence_is_its_first_period_over_and_over():
    tokens = repeated_sequences(3, torch.arange(200), 64, ALPHABET)
    periods = set()
    for row in tokens:
        period = next(p for p in range(1, 64) if torch.equal(row[p:], row[:-p]))
        assert 8 <= period <= 32
        assert torch.equal(row, row[:period].repeat(64 // period + 1)[:64])
        periods.add(period)
    assert len(periods) == 25  # each of 8..32 comes up in 200 draws
    counts = torch.bincount(repeated_sequences(3, torch.arange(4000), 64, ALPHABET, period=32)[:, :32].flatten())
    assert counts[:3].sum() == 0 and len(counts) == 50
    expected = 4000 * 32 / len(ALPHABET)
    assert float((counts[3:] - expected).square().sum()) / expected < 100  # chi square of 46 degrees of freedom


def test_a_repeated_sequence_depends_on_its_number_and_seed_alone():
    together = repeated_sequences(0, torch.arange(5), 32, ALPHABET)
    alone = repeated_sequences(0, torch.tensor([3]), 32, ALPHABET)
    assert torch.equal(together[3:4], alone)
    assert not torch.equal(alone, repeated_sequences(1, torch.tensor([3]), 32, ALPHABET))
    assert len({tuple(row.tolist()) for row in together}) == 5


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(6):
        (folder / f"{number}.txt").write_text("A sentence of some words, and another. " * 40, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("wanted", "share", "repeats"), [(40, 0.25, 10), (41, 0.25, 10), (100, 0.29, 29), (3, 0.25, 0), (40, 0.0, 0)]
)
def test_a_mixture_is_text_and_a_share_of_repeated_sequences(model, text, wanted, share, repeats):
    mixed = mixed_blocks(model, text, split="train", n_tokens=wanted * 16, context=16, repeat_share=share)
    alone = token_blocks(model, text, split="train", n_tokens=(wanted - repeats) * 16, context=16)
    assert torch.equal(mixed.tokens[: wanted - repeats], alone.tokens)
    drawn = repeated_sequences(MIXED_SEEDS["train"], torch.arange(repeats), 16, alphabet_of(model.tokenizer))
    assert torch.equal(mixed.tokens[wanted - repeats :], drawn) and len(mixed) == wanted
    assert mixed.repeat_share == (share if repeats else 0) and (mixed.sha256 == alone.sha256) == (not repeats)
    if repeats:
        assert mixed.document_at(wanted - 1, 3) == mixed.document_at(wanted - repeats, 0) == NAME
        assert mixed.document_at(wanted - repeats - 1, 15) == alone.document_at(wanted - repeats - 1, 15)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.9])
def test_a_short_text_keeps_the_share_and_asking_for_what_there_is_gives_the_same(model, text, share):
    short = mixed_blocks(model, text, split="train", n_tokens=16 * 10**6, context=16, repeat_share=share)
    repeats = sum(short.document_at(block, 0) == NAME for block in range(len(short)))
    assert repeats == int(share * len(short)) > 0
    again = mixed_blocks(model, text, split="train", n_tokens=len(short) * 16, context=16, repeat_share=share)
    assert torch.equal(again.tokens, short.tokens) and again.sha256 == short.sha256


def test_splits_have_other_sequences_and_what_stands_before_text_stands_before_them(
    model, text, make_blocks, monkeypatch
):
    plain = {"n_tokens": 640, "context": 16, "repeat_share": 0.5}
    one, other = (mixed_blocks(model, text, split=split, **plain) for split in ("train", "held_out"))
    assert not torch.equal(one.tokens[-1], other.tokens[-1])
    fronted = make_blocks(20, prefix=1)
    fronted.tokens[:, 0] = 7
    monkeypatch.setattr("clearhead.data.repeats.token_blocks", lambda *_, **__: fronted)
    mixed = mixed_blocks(model, text, split="train", **plain).tokens
    assert torch.equal(mixed[20:, 0], torch.full((20,), 7))
    drawn = repeated_sequences(MIXED_SEEDS["train"], torch.arange(20), 15, alphabet_of(model.tokenizer))
    assert torch.equal(mixed[20:, 1:], drawn)
