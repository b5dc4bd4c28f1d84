import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from clearhead.data import text
from clearhead.data.text import documents, separator_of, token_blocks
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.model.access import Model
from clearhead.model.bundled import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "blocks"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny())


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    for number in range(12):
        (path / f"{number}.txt").write_text(f"Document {number} tells of the sea. " * (number + 1))
    return str(path)


def _word_tokenizer(special: list[str], prefix: str | None = None, **names: str) -> PreTrainedTokenizerFast:
    words = [*special, "a", "b", "c"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if prefix:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{prefix} $A", special_tokens=[(prefix, words.index(prefix))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=[s for s in special if s not in names.values()], **names
    )


def test_blocks_hold_the_documents_and_separators_in_order(tokenizer, folder):
    blocks = token_blocks(tokenizer, folder, split="train", n_tokens=None, context=16)
    expected = []
    for document in documents(folder, "train"):
        if expected:
            expected.append(tokenizer.eos_token_id)
        expected += tokenizer(document.text, add_special_tokens=False).input_ids
    assert len(blocks) == len(expected) // 16
    assert blocks.tokens.dtype == torch.int64
    assert blocks.tokens.flatten().tolist() == expected[: len(blocks) * 16]


def test_n_tokens_is_a_beginning_rounded_up_to_blocks(tokenizer, folder):
    whole = token_blocks(tokenizer, folder, split="train", n_tokens=None, context=16)
    part = token_blocks(tokenizer, folder, split="train", n_tokens=100, context=16)
    assert len(part) == 7
    assert torch.equal(part.tokens, whole.tokens[:7])
    assert part.sha256 != whole.sha256


def test_every_token_knows_its_document(tokenizer, folder):
    blocks = token_blocks(tokenizer, folder, split="train", n_tokens=None, context=16)
    assert blocks.names == [document.name for document in documents(folder, "train")]
    for block in range(len(blocks)):
        # the number a document repeats names it, so decoded text and names must agree
        assert blocks.names[blocks.documents[block]] == blocks.document_at(block, 0)
    flat = blocks.tokens.flatten()
    ends = torch.nonzero(flat == tokenizer.eos_token_id).flatten().tolist()
    found = [blocks.document_at((end + 1) // 16, (end + 1) % 16) for end in ends if end + 1 < len(flat)]
    assert found == blocks.names[1 : len(found) + 1]


def test_the_split_reaches_the_blocks(tokenizer, folder):
    names = {
        split: set(token_blocks(tokenizer, folder, split=split, n_tokens=None, context=8).names)
        for split in ("train", "held_out")
    }
    assert names["train"] and names["held_out"] and not names["train"] & names["held_out"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_files_of_rows_are_read(tokenizer, tmp_path, form):
    rows = [{"text": f"the number {number} and more"} for number in range(30)]
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    blocks = token_blocks(tokenizer, str(path), split="train", n_tokens=None, context=16)
    assert tokenizer.decode(blocks.tokens.flatten()).startswith("the number 0 and more<|endoftext|>the number 1 and")


def test_the_second_call_reads_the_cache(tokenizer, folder, cache, monkeypatch):
    first = token_blocks(tokenizer, folder, split="train", n_tokens=64, context=16)
    monkeypatch.setattr(text, "documents", lambda *_: pytest.fail("the text was read again"))
    second = token_blocks(tokenizer, folder, split="train", n_tokens=64, context=16)
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.starts, second.starts)
    assert (first.names, first.sha256, first.prefix) == (second.names, second.sha256, second.prefix)
    assert len(list(cache.iterdir())) == 1


def test_changed_text_context_or_tokenizer_is_read_anew(tokenizer, folder):
    arguments = {"split": "train", "n_tokens": 64}
    first = token_blocks(tokenizer, folder, context=16, **arguments)
    assert token_blocks(tokenizer, folder, context=8, **arguments).context == 8
    words = _word_tokenizer(["<s>"], bos_token="<s>")
    assert token_blocks(words, folder, context=16, **arguments).sha256 != first.sha256
    for path in Path(folder).iterdir():
        path.write_text("Quite another text. " * 20)
    assert token_blocks(tokenizer, folder, context=16, **arguments).sha256 != first.sha256


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_cache_file_is_refused(tokenizer, folder, cache, damage):
    token_blocks(tokenizer, folder, split="train", n_tokens=64, context=16)
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flip":
        # somewhere in the token ids, the largest tensor and last in the file
        content[-9] ^= 1
        content[-200] ^= 1
    path.write_bytes(content[:-50] if damage == "truncate" else content)
    with pytest.raises(CorruptFileError, match=f"{path.name}.*delete it and run again"):
        token_blocks(tokenizer, folder, split="train", n_tokens=64, context=16)


def test_text_shorter_than_a_block_names_the_counts(tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("a few words and a last one")
    with pytest.raises(ClearheadError, match=r"has \d+ tokens in 1 documents: 0 blocks of 64.*context up to \d+"):
        token_blocks(tokenizer, str(tmp_path / "short.txt"), split="train", n_tokens=None, context=64)
    with pytest.raises(ClearheadError, match="0 blocks of 64"):
        token_blocks(tokenizer, str(tmp_path / "short.txt"), split="train", n_tokens=64, context=64, at_most=True)


def test_more_tokens_than_there_are_names_how_many(tokenizer, folder):
    there = token_blocks(tokenizer, folder, split="train", n_tokens=None, context=16).tokens.numel()
    with pytest.raises(ClearheadError, match=f"Ask for at most {there:,} tokens"):
        token_blocks(tokenizer, folder, split="train", n_tokens=10**6, context=16)
    assert (
        token_blocks(tokenizer, folder, split="train", n_tokens=10**6, context=16, at_most=True).tokens.numel() == there
    )


def test_models_bring_their_tokenizer_and_limit_the_context(folder):
    model = Model.load("clearhead-tiny", self_test=False)
    assert token_blocks(model, folder, split="train", n_tokens=64, context=32).context == 32
    with pytest.raises(ClearheadError, match="expected 2 to 128 tokens, got 129"):
        token_blocks(model, folder, split="train", n_tokens=None, context=129)
    bare = Model.load("clearhead-tiny", tokenizer=False, self_test=False)
    with pytest.raises(ClearheadError, match="without a tokenizer"):
        token_blocks(bare, folder, split="train", n_tokens=64, context=32)


@pytest.mark.parametrize(("n_tokens", "context"), [(64, 1), (0, 16), (-5, 16)])
def test_sizes_that_mean_nothing_are_refused(tokenizer, folder, n_tokens, context):
    with pytest.raises(ClearheadError, match="expected"):
        token_blocks(tokenizer, folder, split="train", n_tokens=n_tokens, context=context)


def test_the_separator_is_what_pretraining_put_between_documents():
    assert separator_of(_word_tokenizer(["<s>", "<|im_end|>", "<|endoftext|>"], eos_token="<|im_end|>")) == 2
    assert separator_of(_word_tokenizer(["<s>", "</s>"], bos_token="<s>", eos_token="</s>")) == 1
    assert separator_of(_word_tokenizer(["<s>"], bos_token="<s>")) == 0
    assert separator_of(_word_tokenizer([])) is None


def test_a_tokenizer_that_begins_text_begins_every_block(tmp_path):
    (tmp_path / "abc.txt").write_text("a b c " * 20)
    words = _word_tokenizer(["<s>", "</s>"], prefix="<s>", bos_token="<s>", eos_token="</s>")
    blocks = token_blocks(words, str(tmp_path / "abc.txt"), split="train", n_tokens=None, context=5)
    assert blocks.prefix == 1
    assert blocks.tokens[:, 0].tolist() == [0] * len(blocks)
    assert blocks.tokens[:, 1:].flatten().tolist()[:6] == [2, 3, 4, 2, 3, 4]
    assert blocks.document_at(1, 0) == blocks.document_at(1, 4) == "abc.txt"


def test_special_tokens_written_in_the_text_are_text(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("one <|endoftext|> two " * 10)
    blocks = token_blocks(tokenizer, str(tmp_path / "a.txt"), split="train", n_tokens=None, context=8)
    assert tokenizer.eos_token_id not in blocks.tokens
    assert "<|endoftext|>" in tokenizer.decode(blocks.tokens.flatten())


def test_long_texts_do_not_warn(tokenizer, tmp_path):
    # warnings are errors here; the tokenizer's own limit is far below this document
    (tmp_path / "long.txt").write_text("many words follow one another " * 400)
    assert len(token_blocks(tokenizer, str(tmp_path / "long.txt"), split="train", n_tokens=None, context=128)) > 10


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("defualt", "did you mean 'default'"),
        ("texts/nothing.txt", "unknown text 'texts/nothing.txt'.*Give 'default', a folder, a file"),
        ("/nowhere/at/all", "unknown text '/nowhere/at/all'"),
        ("a/b/c", "unknown text 'a/b/c'"),
    ],
)
def test_unknown_sources_say_what_there_is(source, words):
    with pytest.raises(UnknownNameError, match=words):
        documents(source)


def test_a_mistyped_file_is_told_from_its_siblings(tmp_path):
    (tmp_path / "book.txt").write_text("text")
    with pytest.raises(UnknownNameError, match="did you mean '.*/book.txt'"):
        documents(str(tmp_path / "boook.txt"))


def test_the_default_text_becomes_blocks(tokenizer):
    blocks = token_blocks(tokenizer, "default", split="held_out", n_tokens=8_000, context=64)
    assert blocks.tokens.shape == (125, 64)
    assert len(blocks.names) > 5
    assert blocks.source == "default"
