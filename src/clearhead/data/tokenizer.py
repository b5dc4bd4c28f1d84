"""A tokenizer of one's own: byte-level BPE, trained on the text that a model will be trained on.

The vocabulary is the separator `<|endoftext|>` (id 0), the 256 bytes, and merges of the most frequent neighbours until
it is full, so every text can be written and nothing is unknown. It is learned from the first `CHARACTERS` of the train
split and cached beside the token blocks, under what the text depends on. The result is a Hugging Face tokenizer that
puts nothing in front of a text.
"""

import hashlib
import json
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from clearhead.data.text import SEPARATORS, documents, state_of
from clearhead.errors import ClearheadError
from clearhead.hub import cache_dir
from clearhead.runs import read_json, write_json

FORMAT = 1  # raise when training changes, so that cached tokenizers of an older version are not taken
CHARACTERS = 10_000_000
SMALLEST = 257  # the bytes and the separator


def train_tokenizer(source: str, vocabulary: int) -> PreTrainedTokenizerBase:
    """A tokenizer with exactly `vocabulary` tokens, learned from the train split of `source` (see `documents`).

    Raises `ClearheadError` when `vocabulary` is below 257 or the text is too short to fill it.
    """
    if vocabulary < SMALLEST:
        raise ClearheadError(
            f"--vocabulary {vocabulary} is too small: 256 bytes and the separator need {SMALLEST}, merges come on top"
        )
    state = state_of(source, "train")
    if state is None:  # the text may change at any time
        return _wrap(_learn(source, vocabulary))
    key = hashlib.sha256(json.dumps([FORMAT, state, vocabulary, CHARACTERS]).encode()).hexdigest()[:32]

    path = cache_dir() / "tokenizers" / f"{key}.json"
    if not path.exists():
        write_json(path, json.loads(_learn(source, vocabulary).to_str()))
    return _wrap(Tokenizer.from_str(json.dumps(read_json(path))))


def _learn(source: str, vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(source), trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ClearheadError(
            f"the train text of {source!r} is too short or too uniform for {vocabulary:,} tokens: it yields "
            f"{tokenizer.get_vocab_size():,}; lower --vocabulary or name a longer text"
        )
    return tokenizer


def _beginning(source: str) -> Iterator[str]:
    characters = 0
    for document in documents(source, "train"):
        yield document.text
        characters += len(document.text)
        if characters >= CHARACTERS:
            return


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SEPARATORS[0], eos_token=SEPARATORS[0])
