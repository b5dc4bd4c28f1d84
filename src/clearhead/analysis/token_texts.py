"""The texts of token ids, as the tables of an atlas hold them."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from clearhead.model.access import Model

Strings = Callable[[np.ndarray], pa.Array]
"""From an array of token ids to their texts."""


class TokenTexts:
    """`Strings` of a model's vocabulary, decoded once; of a model without a tokenizer, token i is `<i>`."""

    def __init__(self, model: Model):
        vocabulary = range(model.d_vocab)
        texts = [f"<{i}>" for i in vocabulary] if model.tokenizer is None else model.token_strings(vocabulary)
        self._texts = pa.array(texts, pa.string())

    def __call__(self, ids: Int[np.ndarray, " n"]) -> pa.Array:
        """The texts of n token ids."""
        return self._texts.take(pa.array(ids))
