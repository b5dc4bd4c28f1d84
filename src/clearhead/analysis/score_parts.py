"""Why chosen heads look: their contrastive scores split exactly over units of the stream, averaged over examples.

For a head's example with query i, the key j from which it moves most (argmax |A_ij v_j|, not the largest score), and
the mean over all keys that i sees,

    s_ij − mean_j' s_ij'  =  Σ_u Q_u  =  Σ_u K_u

Q_u being what unit u, wherever it stands, gives the query's side, K_u what it gives the key's side beyond what it gives
the average key (tracing/qk.py, which checks the sum). Softmax sees differences only, so what all keys share is no
reason. Units are embeddings, features and Lorsa heads of the dictionaries below the layer, what these leave, whole MLPs
where there is no dictionary, and biases; each is added up over positions. Of a head's strongest examples the `EXAMPLES`
with the fewest tokens before the query are taken: the cost is that of tracing a prompt, for each. Values are in units
of the score; rows have no `share`, which tells them from the statistics of looking.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int

from clearhead.analysis.examples import CATEGORIES, Chosen
from clearhead.analysis.neighbours import Neighbourhood
from clearhead.analysis.relations import Related
from clearhead.analysis.token_texts import Strings
from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing.qk import ScoreSplit, ask_lorsa, explain
from clearhead.circuits.tracing.sources import open_prompt
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.sae import Sae
from clearhead.errors import ClearheadError
from clearhead.runs import progress
from clearhead.spectral.writes import Parts
from clearhead.units import Unit

EXAMPLES = 3
"""Examples per head."""
PARTS = 8
"""Units named per head and side: so many of those that mean something, so many of the rest."""
NAMED = ("embedding", "feature", "lorsa")
"""Kinds of units that mean something by themselves; MLPs, biases and what dictionaries leave are the rest."""


def heads_named(asked: str, n_heads: int, count: Int[np.ndarray, " n"]) -> list[int]:
    """The heads that `--explain-heads` asks for: numbers with commas between them, or topN, the N most active.

    Raises `ClearheadError` for a head that does not exist; dead heads are not among the most active.
    """
    if asked.startswith("top"):
        order = np.lexsort((np.arange(n_heads), -count))
        return [int(head) for head in order[: int(asked[3:])] if count[head] > 0]
    heads = sorted({int(word) for word in asked.split(",")})
    if heads[-1] >= n_heads:
        raise ClearheadError(f"there is no Lorsa head {heads[-1]} to explain: there are {n_heads}, counted from 0")
    return heads


def split_scores(
    parts: Parts,
    dictionaries: Dictionaries,
    layer: int,
    chosen: Chosen,
    tokens: Int[np.ndarray, "blocks t"],
    heads: Sequence[int],
) -> dict[int, list[ScoreSplit]]:
    """By head, the splits of its scores in `EXAMPLES` of its strongest examples; none for a head without examples."""
    found: dict[int, list[ScoreSplit]] = {}
    with progress("scores", len(heads)) as advance:
        for head in heads:
            mine = np.flatnonzero((chosen.unit == head) & (chosen.category == CATEGORIES.index("top")))
            block, position = np.divmod(chosen.token[mine], tokens.shape[1])
            splits = []
            for at in np.lexsort((mine, position))[:EXAMPLES]:
                query = int(position[at])
                prompt = torch.from_numpy(tokens[block[at], : query + 1])[None].to(parts.model.device)
                opened = open_prompt(parts, prompt, dictionaries)
                splits += explain(opened, [ask_lorsa(opened, Unit("lorsa", layer, head, query), "mean")])
            found[head] = splits
            advance(1)
    return found


def mean_parts(splits: Sequence[ScoreSplit], side: str) -> dict[str, float]:
    """By unit without its position, the mean over the splits of what it gives one side; Σ = the mean score."""
    total: dict[str, float] = {}
    for split in splits:
        values = split.queries if side == "query" else split.keys
        for unit, value in zip(split.units, values.double().tolist(), strict=True):
            name = unit.id.partition("@")[0]
            total[name] = total.get(name, 0.0) + value / len(splits)
    return total


def explain_heads(
    lorsa: Lorsa,
    neighbourhood: Neighbourhood,
    chosen: Chosen,
    tokens: Int[np.ndarray, "blocks t"],
    heads: Sequence[int],
    strings: Strings,
) -> list[Related]:
    """Relations `query` and `key` of some heads, by the exact split of their scores.

    Raises as `Dictionaries`, `open_prompt` and `ask_lorsa` do.
    """
    model, layer = neighbourhood.model, neighbourhood.layer
    below = [neighbour.dictionary for neighbour in neighbourhood.writers if not isinstance(neighbour.dictionary, Sae)]
    dictionaries = Dictionaries(model, [lorsa, *below])
    splits = split_scores(Parts(model), dictionaries, layer, chosen, tokens, heads)
    return [
        _related(side, {head: mean_parts(splits[head], side) for head in heads}, named, strings)
        for side in ("query", "key")
        for named in (True, False)
    ]


def _related(side: str, parts: Mapping[int, Mapping[str, float]], named: bool, strings: Strings) -> Related:
    """The largest parts of each head among the units that mean something, or among the others."""
    rows: list[tuple[int, str, float]] = []
    for head, values in parts.items():
        mine = [
            (head, name, value) for name, value in values.items() if (name.split(".")[0] in NAMED) == named and value
        ]
        rows += sorted(mine, key=lambda row: (-abs(row[2]), row[1]))[:PARTS]
    names = np.array([name for _, name, _ in rows], dtype=np.str_)
    unit, value = np.array([row[0] for row in rows], np.int64), np.array([row[2] for row in rows], np.float64)
    return Related(side, unit, names, _labels(names.tolist(), strings), value)


def _labels(names: Sequence[str], strings: Strings) -> pa.Array:
    """Tokens by their text; other units have no label."""
    ids = [int(name.split(".")[1]) if name.startswith("embedding.") else -1 for name in names]
    texts = strings(np.maximum(np.array(ids, np.int64), 0)).to_pylist()
    return pa.array([text if at >= 0 else "" for at, text in zip(ids, texts, strict=True)], pa.string())
