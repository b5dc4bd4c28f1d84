"""A model whose vocabulary is the words of the detectors' prompts, one token each; its heads are never looked at.

Planted units take tokens and logit directions from it where clearhead-tiny has no token for these words. The directions
are random; those of the words of one list share a part, as in a trained model.
"""

import re
from functools import cache

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from clearhead.analysis.behaviours import name_mover, successor
from clearhead.analysis.behaviours.token_lists import ORDINALS
from clearhead.data.generators import ioi
from clearhead.model.access import Model

WIDTH = 64
PIECES = r" ?[A-Za-z]+|\d|\s|[^\sA-Za-z\d]"
"""A word with the space before it, a digit, or any other single character."""


@cache
def word_model() -> Model:
    """The model, the same at every call."""
    lists = [words.split() for words in (*ORDINALS.values(), ioi.NAMES)]
    forms = [[form for word in words for form in (word, f" {word}")] for words in lists]
    texts = [*successor.prompts(0), *name_mover.prompts(list[str](ioi.NAMES.split()), 0), "The"]
    pieces = {piece for text in texts for piece in re.findall(PIECES, text)}
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", *sorted(pieces.union(*forms))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_attention_heads=2,
        vocab_size=len(vocabulary),
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        hf = LlamaForCausalLM(config).eval()
        directions = hf.lm_head.weight.normal_()
        for words in forms:
            directions[[vocabulary[word] for word in words]] += torch.randn(WIDTH)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    return Model(hf, fast, name="words", self_test=False)
