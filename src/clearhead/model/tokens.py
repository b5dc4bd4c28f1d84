r"""Text to token ids, and token ids to strings that show every byte.

`vocabulary_strings` decodes each token alone. A token may be a piece of a character: its bytes are then shown as
`\xNN`, never as a replacement character that hides which bytes they were. Leading spaces are kept.
"""

import json
import re

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from clearhead.errors import ClearheadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How tokenizers with byte fallback write a single byte."""
_SPACE = "\u2581"
"""How sentencepiece tokenizers write a space."""


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase, text: str | list[str], special_tokens: bool
) -> Int[Tensor, "b t"]:
    """Token ids of texts with equally many tokens. Raises `ClearheadError` for none, or for different lengths."""
    rows = _rows(tokenizer, [text] if isinstance(text, str) else text, special_tokens)
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ClearheadError(
            f"texts of {lengths[0]} to {lengths[-1]} tokens cannot share a batch without padding; use tokenize_padded,"
            " and pass its mask to run"
        )
    return torch.tensor(rows)


def pad_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], side: str, special_tokens: bool
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Token ids padded on one side, and the mask that hides the padding."""
    if side not in ("left", "right"):
        raise ClearheadError(f"side: expected 'left' or 'right', got {side!r}")
    rows = _rows(tokenizer, texts, special_tokens)
    longest = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        span = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        tokens[index, span] = torch.tensor(row)
        mask[index, span] = 1
    return tokens, mask


def vocabulary_strings(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    r"""Each of `size` token ids decoded alone; bytes that are not valid UTF-8 on their own are shown as `\xNN`.

    Ids that the tokenizer does not have (embeddings are often padded to a round number) are `[unused N]`.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    else:
        decoder = ""
    literal = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    pieces = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    strings = []
    for number, piece in enumerate(pieces):
        if piece is None:
            strings.append(f"[unused {number}]")
        elif piece in literal:
            strings.append(piece)
        elif "ByteLevel" in decoder:
            strings.append(_from_byte_level(piece))
        elif match := _BYTE_TOKEN.fullmatch(piece):
            strings.append(bytes([int(match[1], 16)]).decode("utf-8", errors="backslashreplace"))
        elif decoder:
            strings.append(piece.replace(_SPACE, " "))
        else:
            strings.append(str(tokenizer.decode([number])))
    return strings + [f"[unused {number}]" for number in range(len(strings), size)]


def _from_byte_level(piece: str) -> str:
    """The text of a byte-level token, whose characters stand for single bytes."""
    if any(character not in _BYTES for character in piece):
        return piece  # added to the vocabulary as text
    return bytes(_BYTES[character] for character in piece).decode("utf-8", errors="backslashreplace")


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Bytes that are printable in Latin-1 stand for themselves; the others, in order, are written from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _rows(tokenizer: PreTrainedTokenizerBase, texts: list[str], special_tokens: bool) -> list[list[int]]:
    """The token ids of each text. Raises `ClearheadError` where a text has none."""
    if not texts:
        raise ClearheadError("no texts were given")
    rows = [tokenizer(text, add_special_tokens=special_tokens)["input_ids"] for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise ClearheadError(f"the text {text!r} has no tokens")
    return rows
