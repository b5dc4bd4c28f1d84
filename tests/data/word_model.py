"""A random-init GPT-2 whose tokenizer has every word of the ioi templates as a token, for tests that need the task.

`clearhead-tiny` cannot serve: its 1,024 tokens hold no first names.
"""

import re

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from clearhead.data.generators import ioi
from clearhead.model.access import Model

SPACE = "\u2581"


def word_model(*, begin: bool = False) -> Model:
    """The model; the same weights each time, with attention far from uniform."""
    tokenizer = word_tokenizer(begin=begin)
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_positions=32,
        vocab_size=len(tokenizer),
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(GPT2LMHeadModel(config), tokenizer, name="words", self_test=False)


def word_tokenizer(*, begin: bool = False) -> PreTrainedTokenizerFast:
    """One token per word, a space in front belonging to it; `begin` puts `<s>` in front of every text."""
    text = " ".join((*ioi.TEMPLATES, ioi.NAMES, ioi.PLACES, ioi.OBJECTS))
    words = sorted(set(re.findall(r"\w+", text)))
    pieces = ["<unk>", "<s>", "</s>", ".", ",", *words, *(SPACE + word for word in words)]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}?\\w+|[.,]"), "isolated")
    tokenizer.decoder = decoders.Replace(SPACE, " ")
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
