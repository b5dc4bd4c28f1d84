"""Attribution graphs with planted numbers: small enough to check by hand, or as large as asked."""

import numpy as np

from clearhead.units.annotations import AttentionTable, Loadings, Supernode
from clearhead.units.graph import Graph
from clearhead.units.provenance import Provenance
from clearhead.units.unit import Unit

PROMPT = ("<s>", "The", " opposite", " of", ' "', "large", '"', " is", ' "')
HOSTILE = ("</script><script>alert(1)</script>", "\u202eabc", "\u200b", " ", "\n", "x" * 90, "<b>", " is", ' "')


def synthetic_graph(n_features=60, n_edges=400, n_layers=6, n_heads=9, tokens=PROMPT, seed=0):
    """A graph of features, Lorsa heads, errors, embeddings and logits whose edges all go upwards."""
    rng = np.random.default_rng(seed)
    last = len(tokens) - 1
    units = [Unit("embedding", index=10 + place, position=place, activation=1.0) for place in range(len(tokens))]
    named = {}
    while len(named) < n_features:
        kind = ("feature", "feature", "feature", "lorsa", "error", "attn_error", "bias", "mlp")[rng.integers(8)]
        layer = int(rng.integers(n_layers))
        index = int(rng.integers(3000)) if kind in ("feature", "lorsa") else None
        position = None if kind == "bias" else min(last, int(rng.beta(2.2, 1.1) * len(tokens)))
        unit = Unit(kind, layer, index, position, activation=float(rng.exponential(3)), write=rng.normal(size=8))
        named[unit.id] = unit
        if n_features > 5 * n_layers * len(tokens) and kind not in ("feature", "lorsa"):
            del named[unit.id]
    order = ("lorsa", "attn_error", "feature", "error", "mlp", "bias")
    units += sorted(named.values(), key=lambda unit: (unit.layer, order.index(unit.kind), unit.position or 0))
    units += [Unit("logit", index=place, position=last) for place in (500, 501, 502)]
    units.append(Unit("target", index=0, position=last))
    n, first, tops = len(units), len(tokens), 4
    rank = {unit: (-1 if unit.kind == "embedding" else 999 if unit.layer is None else unit.layer) for unit in units}
    edges = {}
    while len(edges) < n_edges:
        source, target = int(rng.integers(n - tops)), int(rng.integers(first, n))
        at = units[target].position
        before = (units[source].position or 0) <= (last if at is None else at)
        fixed = units[target].kind in ("error", "attn_error", "bias", "mlp")
        if rank[units[source]] < rank[units[target]] and before and not fixed:
            edges[source, target] = float(rng.standard_t(2) * rng.exponential())
    source, target = np.array(list(edges)).T
    weight = np.array(list(edges.values()))
    influence = np.full(n, np.nan)
    influence[: n - tops] = np.cumsum(rng.dirichlet(np.full(n - tops, 0.3)))[rng.permutation(n - tops)]
    probability = np.full(n, np.nan)
    probability[-4:-1] = (0.61, 0.12, 0.03)
    return Graph(
        units,
        source,
        target,
        weight,
        Provenance(
            model="synthetic-model",
            protocol="direct effect on the pre-activation, patterns and norm scales frozen; made up by a test",
            prompt="".join(tokens),
            versions={"clearhead": "0"},
            seed=seed,
        ),
        values={"influence": influence, "probability": probability},
        loadings=_loadings(rng, units, source, target, weight, n_layers, n_heads),
        attention=_attention(units, n_layers, last),
        supernodes=(
            Supernode("opposite </script>", (units[first].id, units[first + 1].id)),
            Supernode("large", (units[5].id,)),
        ),
        scores={"replacement": 0.612, "completeness": 0.844, "error_share": 0.31, "units_before_pruning": 1234.0},
        tokens=tokens,
        labels={f"logit.500@{last}": "</script><b>", f"logit.501@{last}": " little", "feature.0.99999@2": "pruned"},
    )


def _loadings(rng, units, source, target, weight, n_layers, n_heads):
    edge, layer, head, value = [], [], [], []
    for at in range(len(weight)):
        if units[source[at]].position == units[target[at]].position:
            continue
        low = units[source[at]].layer or 0
        cells = [(above, number) for above in range(low, n_layers) for number in range(n_heads)]
        chosen = rng.permutation(len(cells))[:6]
        for share, cell in zip(rng.dirichlet(np.full(len(chosen), 0.5)), chosen, strict=True):
            edge.append(at)
            layer.append(cells[cell][0])
            head.append(cells[cell][1])
            value.append(weight[at] * share * (1 if rng.random() < 0.8 else -1))
    return Loadings(edge, layer, head, value, "order 1")


def _attention(units, n_layers, last):
    low = [unit.id for unit in units if unit.layer in (None, 0) and unit.kind != "logit"][:6]
    top = n_layers - 1
    pairs = tuple((low[a], low[b], round(3.0 / (1 + a + b) * (-1) ** (a * b), 3)) for a in range(5) for b in range(5))
    ranked = tuple(sorted(pairs, key=lambda pair: -abs(pair[2])))
    return (
        AttentionTable(
            f"edge.{top}.3.5@{last}",
            score=7.25,
            total=7.0,
            against=0,
            pairs=(*ranked, ("feature.0.99999@2", low[0], -0.01)),
            queries=tuple((low[a], sum(w for q, _, w in pairs if q == low[a])) for a in range(5)),
            keys=tuple((low[b], sum(w for _, k, w in pairs if k == low[b])) for b in range(5)),
            triples=((low[0], 0, low[0], 2.0), (low[0], 1, low[1], -0.5), (low[1], 0, low[1], 0.25)),
        ),
        AttentionTable(f"edge.{top}.3.0@{last}", score=-1.0, total=-1.0, pairs=((low[0], low[1], -1.0),)),
    )
