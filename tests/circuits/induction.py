"""A GPT-2 whose weights are set to do induction, and prompts whose two corruptions need different parts of it.

    [start, x, A, B, y, z, A] → B

Head 0.2 attends to the previous position and writes the token there into a scratch block; head 1.1 looks with its own
token for a scratch block that holds it, and copies the token beside it into the block that the unembedding reads.
Where the corrupt prompt has another token in place of the first A, the keys of head 1.1 decide; where it has another
token in place of B, its values. All other heads attend and write at random into dimensions that nothing reads.
"""

from typing import Literal

import torch

from clearhead.data.tasks import TaskBatch
from clearhead.model.access import Model
from tests.circuits.planted import JUNK, OUT, PLACE, SCRATCH, TOKEN, VOCABULARY, WIDTH, planted_model

SHARP = 3.0
EDGES = {"match": ["edge.0.2.2@3", "edge.1.1.3@6"], "answer": ["edge.1.1.3@6"]}
"""The attention edges that do it: to the A before B, and from the last token to B."""
GRAPH_EDGES = {
    "match": ["a0.h2->a1.h1<k>", "a1.h1->logits", "input->a0.h2<v>"],
    "answer": ["a1.h1->logits", "input->a1.h1<v>"],
}


def induction_model() -> Model:
    """Two layers of four heads in float64."""
    model = planted_model()
    generator = torch.Generator().manual_seed(1)
    eye = torch.eye(VOCABULARY, dtype=torch.float64)
    places = torch.eye(8, dtype=torch.float64) * SHARP
    with torch.no_grad():
        for layer, block in enumerate(model.hf.transformer.h):
            block.attn.c_attn.bias.zero_()
            block.attn.c_proj.weight.zero_()
            for head in range(4):
                part = slice(head * WIDTH, (head + 1) * WIDTH)
                q, k, v = (one[:, part] for one in block.attn.c_attn.weight.split(48, dim=1))
                o = block.attn.c_proj.weight[part]
                for weight in (q, k, v):
                    weight.zero_()
                if (layer, head) == (0, 2):
                    q[PLACE, :8] = places.roll(-1, 1)
                    k[PLACE, :8] = places
                    v[TOKEN, :VOCABULARY] = eye
                    o[:VOCABULARY, SCRATCH] = eye * 4
                elif (layer, head) == (1, 1):
                    q[TOKEN, :VOCABULARY] = eye * SHARP
                    k[SCRATCH, :VOCABULARY] = eye * SHARP
                    v[TOKEN, :VOCABULARY] = eye
                    o[:VOCABULARY, OUT] = eye * 4
                else:
                    for weight in (q, k, v):
                        weight.copy_(torch.randn(48, WIDTH, generator=generator))
                    o[:, JUNK] = torch.randn(WIDTH, JUNK.stop - JUNK.start, generator=generator).double() * 0.03
    return model


def induction_rows(corrupt: Literal["match", "answer"], n: int = 2) -> TaskBatch:
    """Prompts of seven different tokens but for the A that comes twice."""
    clean, other, answers, wrong = [], [], [], []
    for item in range(n):
        x, a, b, y, z, c = (3 + (item + step) % 8 for step in range(6))
        clean.append([1, x, a, b, y, z, a])
        other.append([1, x, c, b, y, z, a] if corrupt == "match" else [1, x, a, c, y, z, a])
        answers.append([b])
        wrong.append([c] if corrupt == "answer" else [3 + (item + 6) % 8])
    return TaskBatch(list(range(n)), torch.tensor(clean), torch.tensor(other), answers, wrong, {})
