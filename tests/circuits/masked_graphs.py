"""What the tests of graph edges share: prompts, families by how exactly their modules compute, a masked forward."""

from torch import Tensor

from clearhead.circuits.curves.graph_edges import GraphEdges
from clearhead.circuits.patching.graph_patching import MaskedGraph
from tests.circuits.random_rows import random_rows

ROWS = random_rows(2, 6)
EXACT = ["gpt2", "gptj", "gpt_neox", "opt", "bloom", "gpt_bigcode"]  # float64 throughout
FLOAT32_INSIDE = ["llama", "qwen3", "gemma2", "olmo2", "cohere", "granite"]


def masked(level: GraphEdges, mask: Tensor, *, grad: bool = False) -> Tensor:
    """Logits at the last token of `ROWS` under a mask of edges [b, n]."""
    replacing = level.replacement.values(ROWS)
    return MaskedGraph(level.parts, ROWS.clean, mask, replacing).run(grad=grad)
