"""A GPT-2 whose weights are set so that exactly two heads move the answer, and the task that they do.

The prompt is a token x, some fillers and an end; the answer is x. Head 0.1 attends to position 0 and copies the token
there into a scratch block of the stream, head 1.2 attends to its own position and copies the scratch block into the
block that the unembedding reads. All other heads attend and write at random, into dimensions that nothing reads; the
norms alone let a little of it through. The MLPs write nothing.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from clearhead.data.tasks import TaskBatch
from clearhead.model.access import Model

VOCABULARY, LENGTH, WIDTH = 11, 6, 12
TOKEN, SCRATCH, OUT = (slice(n * VOCABULARY, (n + 1) * VOCABULARY) for n in range(3))
PLACE = slice(3 * VOCABULARY, 3 * VOCABULARY + 8)
JUNK = slice(PLACE.stop, 48)
CIRCUIT = ["head.0.1", "head.1.2"]
SHARP = 8.0


def planted_model(dtype: torch.dtype = torch.float64) -> Model:
    """Two layers of four heads; the circuit is `CIRCUIT`."""
    config = GPT2Config(
        n_layer=2,
        n_embd=48,
        n_head=4,
        n_positions=8,
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    hf = GPT2LMHeadModel(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.fill_(1.0 if name.endswith("weight") and "ln_" in name else 0.0)
        hf.transformer.wte.weight[:, TOKEN] = torch.eye(VOCABULARY, dtype=dtype) * 3
        hf.transformer.wpe.weight[:, PLACE] = torch.eye(8, dtype=dtype) * 3
        hf.lm_head.weight[:, OUT] = torch.eye(VOCABULARY, dtype=dtype) * 2
        for layer, block in enumerate(hf.transformer.h):
            q, k, v = block.attn.c_attn.weight.split(48, dim=1)
            o = block.attn.c_proj.weight
            for head in range(4):
                part = slice(head * WIDTH, (head + 1) * WIDTH)
                copied = slice(part.start, part.start + VOCABULARY)
                if (layer, head) == (0, 1):
                    block.attn.c_attn.bias[part.start] = SHARP
                    k[PLACE.start, part.start] = SHARP
                    v[TOKEN, copied] = torch.eye(VOCABULARY, dtype=dtype)
                    o[copied, SCRATCH] = torch.eye(VOCABULARY, dtype=dtype) * 4
                elif (layer, head) == (1, 2):
                    q[PLACE, part.start : part.start + 8] = torch.eye(8, dtype=dtype) * SHARP
                    k[PLACE, part.start : part.start + 8] = torch.eye(8, dtype=dtype) * SHARP
                    v[SCRATCH, copied] = torch.eye(VOCABULARY, dtype=dtype)
                    o[copied, OUT] = torch.eye(VOCABULARY, dtype=dtype) * 4
                else:
                    for weight in (q, k, v):
                        weight[:, part] = torch.randn(48, WIDTH, generator=generator).to(dtype)
                    o[part, JUNK] = torch.randn(WIDTH, JUNK.stop - JUNK.start, generator=generator).to(dtype) * 0.1
    return Model(hf, name="planted")


def planted_rows(n: int = 4, *, first: int = 0, length: int = LENGTH) -> TaskBatch:
    """Items `first` to `first + n`: other answers and other fillers, the corrupt prompt begins with another token."""
    clean, corrupt, answers, wrong = [], [], [], []
    for item in range(first, first + n):
        right, other = 3 + item % 8, 3 + (item + 3) % 8
        fillers = [3 + (item + 2 * place) % 8 for place in range(length - 2)]
        clean.append([right, *fillers, 1])
        corrupt.append([other, *fillers, 1])
        answers.append([right])
        wrong.append([other])
    return TaskBatch(
        items=list(range(first, first + n)),
        clean=torch.tensor(clean),
        corrupt=torch.tensor(corrupt),
        answers=answers,
        wrong_answers=wrong,
        labels={"end": torch.full((n,), length - 1)},
    )
