"""Text as blocks of token ids: what is read, in which order, and how it is cut.

`documents` yields the text of a source; `token_blocks` tokenises it and cuts it into blocks of `context` tokens:

    document, separator, document, separator, ...   cut every `context` tokens, the incomplete rest dropped

The separator is the vocabulary's `<|endoftext|>` or `<|end_of_text|>`, which pretraining put between documents (a chat
model's end-of-sequence token often is another), else the end-of-sequence token, else the beginning-of-sequence token,
else none. Where the tokenizer itself puts a beginning-of-sequence token in front of text (Gemma, Llama 3), every block
begins with it; elsewhere nothing is put in front, and position 0 of a block is an arbitrary place in a document.
Special tokens written out in the text are read as text, so a separator is always a boundary.

Position 0 attends to itself alone; losses and metrics leave it out, not this module.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from clearhead.data import docstrings, files
from clearhead.data.document import Document, Split
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.hub import cache_dir
from clearhead.runs import written_aside

if TYPE_CHECKING:
    from clearhead.model.access import Model

__all__ = ["Document", "TokenBlocks", "documents", "token_blocks"]

FORMAT = 1  # raise when packing changes, so that cached blocks of an older version are not taken
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>")
BATCH_CHARACTERS = 100_000  # tokenised at once: enough to keep the tokenizer busy, little to read past the end
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of token ids and the documents they come from."""

    tokens: Int64[Tensor, "n t"]
    documents: Int64[Tensor, " n"]
    """Index into `names` of the document each block's first text token belongs to."""
    starts: Int64[Tensor, " documents"]
    """Where each document begins in the stream of text tokens; see `document_at`."""
    names: list[str]
    source: str
    split: Split
    prefix: int
    """How many tokens (0 or 1) stand in front of the text in every block."""
    sha256: str
    """Hash of the token ids and their shape: equal text, tokenizer, context and packing give equal hashes."""
    repeat_share: float = 0.0
    """Share of the blocks that are random tokens repeated (data/repeats.py); they stand behind those of text."""

    @property
    def context(self) -> int:
        """Tokens per block."""
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def document_at(self, block: int, position: int) -> str:
        """The name of the document that the token at `position` of `block` belongs to."""
        place = block * (self.context - self.prefix) + max(position - self.prefix, 0)
        return self.names[int(torch.searchsorted(self.starts, place, right=True)) - 1]


def documents(source: str = "default", split: Split = "train") -> Iterator[Document]:
    """The documents of one split of a source, in an order that depends on nothing but the source.

    `source`: "default" (docstrings of installed packages), a folder, a file (.txt, .jsonl, .json, .parquet), or a
    Hugging Face dataset `owner/name`. Raises `UnknownNameError` for anything else, `ClearheadError` as the module of
    each kind of source says.
    """
    if source == "default":
        return docstrings.documents(split)
    path = Path(source).expanduser()
    if path.exists():
        return files.documents(path, split)
    _refuse_unless_hub_name(source, path)
    from clearhead.data import hub_text  # importing datasets takes a second that local text need not pay

    return hub_text.documents(source, split)


def token_blocks(
    model: "Model | PreTrainedTokenizerBase | None",
    source: str,
    *,
    split: Split,
    n_tokens: int | None,
    context: int,
    at_most: bool = False,
) -> TokenBlocks:
    """Blocks of `context` tokens of a source: the first `n_tokens` rounded up to whole blocks, or all for None.

    With `at_most`, a text that is shorter than `n_tokens` gives what it has, at least one block.

    Cached in the user's cache for local sources; the key holds the installed versions (default text) or every file's
    path, size and time of change, the tokenizer, `context` and `n_tokens`. Raises `ClearheadError` when the text is
    shorter than one block or than `n_tokens`, or `context` exceeds the model's; `CorruptFileError` for a damaged
    cache file.
    """
    if isinstance(model, PreTrainedTokenizerBase):
        tokenizer, longest = model, None
    else:
        tokenizer, longest = (model.tokenizer, model.n_ctx) if model is not None else (None, None)
    if tokenizer is None:
        raise ClearheadError("the model was loaded without a tokenizer; load it with tokenizer=True to read text")
    if context < 2 or (longest is not None and context > longest):
        raise ClearheadError(f"context: expected 2 to {longest or 'any number of'} tokens, got {context}")
    if n_tokens is not None and n_tokens < 1:
        raise ClearheadError(f"n_tokens: expected at least 1, or None for all there are, got {n_tokens}")
    n_blocks = None if n_tokens is None else -(-n_tokens // context)
    state = state_of(source, split)
    if state is None:
        return _pack(tokenizer, source, split, n_blocks, context, at_most)
    key = json.dumps([FORMAT, state, split, _tokenizer_hash(tokenizer), context, n_blocks, at_most])
    path = cache_dir() / "blocks" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    if path.exists():
        return _load(path)
    blocks = _pack(tokenizer, source, split, n_blocks, context, at_most)
    _save(path, blocks)
    return blocks


def separator_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id put between documents, or None; see the module's docstring."""
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    names = (*SEPARATORS, tokenizer.eos_token, tokenizer.bos_token)
    return next((special[name] for name in names if name in special), None)


def _pack(
    tokenizer: PreTrainedTokenizerBase, source: str, split: Split, n_blocks: int | None, context: int, at_most: bool
) -> TokenBlocks:
    separator = separator_of(tokenizer)
    added = tokenizer("").input_ids
    prefix = [tokenizer.bos_token_id] if added and added[0] == tokenizer.bos_token_id else []
    body = context - len(prefix)
    wanted = None if n_blocks is None else n_blocks * body
    parts: list[np.ndarray] = []
    names: list[str] = []
    starts: list[int] = []
    length = 0
    for name, ids in _tokenised(tokenizer, documents(source, split)):
        if wanted is not None and length >= wanted:
            break
        if length and separator is not None:
            parts.append(np.array([separator], dtype=np.int64))
            length += 1
        names.append(name)
        starts.append(length)
        parts.append(ids)
        length += len(ids)
    available = length // body
    least = 1 if at_most or n_blocks is None else n_blocks
    if available < least:
        advice = f"Ask for at most {available * context:,} tokens" if available else f"Take a context up to {length}"
        raise ClearheadError(
            f"the {split.replace('_', '-')} text of {source!r} has {length:,} tokens in {len(names):,} documents: "
            f"{available:,} blocks of {context} tokens, fewer than {least:,}. {advice}, or name a longer text"
        )
    n_blocks = min(n_blocks or available, available)
    stream = np.concatenate(parts)[: n_blocks * body].reshape(n_blocks, body)
    tokens = np.concatenate([np.tile(np.array(prefix, dtype=np.int64), (n_blocks, 1)), stream], axis=1)
    first = np.searchsorted(np.array(starts), np.arange(n_blocks) * body, side="right") - 1
    return TokenBlocks(
        tokens=torch.from_numpy(tokens),
        documents=torch.from_numpy(first.astype(np.int64)),
        starts=torch.tensor(starts),
        names=names,
        source=source,
        split=split,
        prefix=len(prefix),
        sha256=hash_tokens(tokens),
    )


def _tokenised(
    tokenizer: PreTrainedTokenizerBase, stream: Iterator[Document]
) -> Iterator[tuple[str, Int[np.ndarray, " t"]]]:
    batch: list[Document] = []
    characters = 0
    for document in stream:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield from _encode(tokenizer, batch)
            batch, characters = [], 0
    if batch:
        yield from _encode(tokenizer, batch)


def _encode(tokenizer: PreTrainedTokenizerBase, batch: list[Document]) -> Iterator[tuple[str, Int[np.ndarray, " t"]]]:
    encoded = tokenizer(
        [document.text for document in batch],
        add_special_tokens=False,
        return_attention_mask=False,
        split_special_tokens=True,
        verbose=False,  # the warning about texts longer than the context does not apply: they are cut
    )
    for document, ids in zip(batch, encoded.input_ids, strict=True):
        if ids:
            yield document.name, np.array(ids, dtype=np.int64)


def state_of(source: str, split: Split) -> str | None:
    """What a local source's text depends on, cheap to find; None for the hub, whose text may change at any time."""
    if source == "default":
        return docstrings.fingerprint(split)
    path = Path(source).expanduser()
    if not path.exists():
        return None
    found = files.text_files(path) if path.is_dir() else [path]
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in found]
    return json.dumps(stats)


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # these two remember the last call, not the tokenizer
        content.pop("truncation", None)
        content.pop("padding", None)
    else:
        content = [type(tokenizer).__name__, tokenizer.get_vocab()]
    text = json.dumps([content, separator_of(tokenizer), tokenizer("").input_ids], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_tokens(tokens: Int64[np.ndarray, "n t"]) -> str:
    """The `sha256` of blocks of these tokens."""
    shape = ",".join(map(str, tokens.shape))
    return hashlib.sha256(shape.encode() + tokens.astype("<i8").tobytes()).hexdigest()


def _save(path: Path, blocks: TokenBlocks) -> None:
    record = {"names": blocks.names, "source": blocks.source, "split": blocks.split, "prefix": blocks.prefix}
    arrays = {"tokens": blocks.tokens, "documents": blocks.documents, "starts": blocks.starts}
    content = save(arrays, metadata={"record": json.dumps(record), "sha256": blocks.sha256})
    with written_aside(path) as aside:
        aside.write_bytes(content)


def _load(path: Path) -> TokenBlocks:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            arrays = {name: file.get_tensor(name) for name in ("tokens", "documents", "starts")}
    except SafetensorError as error:
        raise CorruptFileError(f"{path} is not a whole safetensors file ({error}); delete it and run again") from error
    if hash_tokens(arrays["tokens"].numpy()) != metadata["sha256"]:
        raise CorruptFileError(f"the token blocks in {path} are not those that were written; delete it and run again")
    return TokenBlocks(**arrays, **json.loads(metadata["record"]), sha256=metadata["sha256"])


def _refuse_unless_hub_name(source: str, path: Path) -> None:
    looks_local = source.startswith((".", "/", "~")) or path.suffix.lower() in files.PLAIN + files.ROWS
    if looks_local or not HUB_NAME.fullmatch(source):
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() and looks_local else []
        raise UnknownNameError(
            "text",
            source,
            [str(path.parent / name) for name in siblings] if siblings else ["default"],
            hint="Give 'default', a folder, a file (.txt, .jsonl, .json, .parquet), or a dataset as owner/name.",
        )
