"""A tokenizer of one's own: every text survives it, it depends on the text alone, and it is learned once."""

import pytest

from clearhead.data import tokenizer as tokenizer_module
from clearhead.data.text import separator_of, token_blocks
from clearhead.data.tokenizer import train_tokenizer
from clearhead.errors import ClearheadError, CorruptFileError

HOSTILE = [
    "",
    " ",
    "\n\n\t",
    "naïve café — “quotes”",
    "日本語 עברית 👩‍🔬",
    "\x00\x7f",
    "<|endoftext|>",
    "  two  spaces",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    for number in range(4):
        (path / f"{number}.txt").write_text(f"Document {number} tells of the sea and of seafarers. " * 20)
    return path


def test_any_text_survives(folder):
    tokenizer = train_tokenizer(str(folder), 280)
    assert len(tokenizer) == 280
    for text in HOSTILE:
        ids = tokenizer(text, split_special_tokens=True).input_ids
        assert tokenizer.decode(ids) == text and 0 not in ids
    assert len(tokenizer(" sea").input_ids) == 1


def test_the_separator_is_token_0_and_nothing_is_put_in_front(folder):
    tokenizer = train_tokenizer(str(folder), 280)
    assert separator_of(tokenizer) == 0 and tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    blocks = token_blocks(tokenizer, str(folder), split="train", n_tokens=None, context=8)
    assert blocks.prefix == 0 and int((blocks.tokens == 0).sum()) in (1, 2)


def test_it_is_learned_once_and_alike(folder, monkeypatch):
    first = train_tokenizer(str(folder), 280).backend_tokenizer.to_str()
    again = tokenizer_module._wrap(tokenizer_module._learn(str(folder), 280))
    assert again.backend_tokenizer.to_str() == first
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "_learn", None)
        assert train_tokenizer(str(folder), 280).backend_tokenizer.to_str() == first
    (folder / "0.txt").write_text("Another text about the forests and the foresters. " * 20)
    assert train_tokenizer(str(folder), 280).backend_tokenizer.to_str() != first


def test_a_damaged_cache_and_impossible_sizes_are_named(folder, cache):
    train_tokenizer(str(folder), 280)
    (kept,) = (cache / "tokenizers").glob("*.json")
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(CorruptFileError, match=str(kept)):
        train_tokenizer(str(folder), 280)
    with pytest.raises(ClearheadError, match="need 257"):
        train_tokenizer(str(folder), 256)
    with pytest.raises(ClearheadError, match="for 5,000 tokens: it yields"):
        train_tokenizer(str(folder), 5000)
