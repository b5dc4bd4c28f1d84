"""Attribution graphs as the JSON that Neuronpedia and circuit-tracer's local page open.

    {metadata, qParams, nodes[], links[], qk_only_nodes{}}      schema_version 1

A feature's number is the Cantor pair of its layer l and index f, (l + f)(l + f + 1)/2 + f, from which both pages find
its dashboard. Ids cannot collide, for each begins with a layer (or E) and names its kind: `3_cro_17_5` (feature 17 of
layer 3 at token 5), `3_lor_17_5`, `3_error_mlp_5`, `3_error_attn_5`, `E_42_5`, `3_edge_1.2_5`.

What the two pages need and their schema does not say: a graph whose highest layer is 0 is refused by Neuronpedia, so
a one-layer model is shown at layer 1 (dashboards keep layer 0); a logit's label must hold `(p=0.123)`; a node without
influence must say null, or the pruning slider hides it; `feature` must be a number also where the schema allows null;
only pinned nodes are drawn in supernodes. Scores and provenance are stored, for the pages compute their own from what
is left after pruning.

Both pages tell features apart by layer, number and position, so a Lorsa head and a transcoder feature of one layer and
index at one token share a label there; their nodes and links stay apart.

Not here: dashboards of features. Read and write vectors are left out.
"""

import gzip
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import clearhead
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.runs import read_json, write_json, written_aside
from clearhead.units import KINDS, AttentionTable, Graph, Unit

LARGEST = 100_000_000
"""Bytes of a compressed graph that Neuronpedia takes."""
PINNED = 200
"""Nodes that its subgraph draws at most."""
TYPES = {
    "feature": "cross layer transcoder",
    "lorsa": "lorsa",
    "error": "mlp reconstruction error",
    "attn_error": "lorsa error",
    "embedding": "embedding",
    "logit": "logit",
    "target": "logit",
    "bias": "bias",
}
"""feature_type by kind of unit; whole MLPs and attention outputs count as errors where nothing explains them."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Dashboards:
    """Where the pages find what a feature does: a folder of JSON files, or source sets on Neuronpedia."""

    features_url: str | None = None
    """`{features_url}/{feature}.json`."""
    source_set: str | None = None
    lorsa_source_set: str | None = None

    def __post_init__(self) -> None:
        if self.features_url is not None and self.source_set is not None:
            raise ClearheadError("features come from one place: give a URL of feature files or a source set, not both")

    def to_dict(self) -> dict[str, str]:
        """As `metadata.feature_details` spells it."""
        names = {
            "feature_json_base_url": self.features_url,
            "neuronpedia_source_set": self.source_set,
            "neuronpedia_lorsa_source_set": self.lorsa_source_set,
        }
        return {name: value for name, value in names.items() if value is not None}


def cantor(layer: int, index: int) -> int:
    """One number for a layer and an index, different for different pairs."""
    return (layer + index) * (layer + index + 1) // 2 + index


def speakable(text: str, longest: int = 80) -> str:
    """`text` as a name of the characters both pages allow, [A-Za-z0-9_.-]; `graph` where none is left."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:longest] or "graph"


def to_neuronpedia(graph: Graph, slug: str, scan: str, dashboards: Dashboards | None = None) -> dict[str, Any]:
    """The graph as Neuronpedia's JSON; `scan` is the model's name there, `slug` the graph's.

    Raises `ClearheadError` for names of other characters, a graph without tokens, logits without a probability, and a
    graph of tokens and logits alone, which Neuronpedia cannot draw.
    """
    for what, name in (("slug", slug), ("scan", scan)):
        if not _NAME.fullmatch(name):
            raise ClearheadError(
                f"{what} {name!r}: only letters, digits, '_', '.' and '-' are allowed, as in {speakable(name)!r}"
            )
    if not graph.tokens:
        raise ClearheadError("this graph does not say its prompt's tokens; build it with tokens=")
    nodes = _Nodes(graph)
    drawn = {unit.id: nodes.node(unit) for unit in graph.units}
    beside: dict[str, dict[str, Any]] = {}
    for table in shown_tables(graph):
        for name in table.names():
            if name not in drawn and name not in beside:
                beside[name] = nodes.node(Unit.parse(name))
        drawn[table.unit]["qk_tracing_results"] = _qk(table, {n: d["node_id"] for n, d in (beside | drawn).items()})
    ids = [drawn[unit.id]["node_id"] for unit in graph.units]
    groups = [[group.name, *(drawn[name]["node_id"] for name in group.units)] for group in graph.supernodes]
    return {
        "metadata": _metadata(graph, slug, scan, dashboards or Dashboards()),
        "qParams": {
            "linkType": "both",
            "pinnedIds": list(dict.fromkeys(member for group in groups for member in group[1:]))[:PINNED],
            "clickedId": "",
            "supernodes": groups,
            "sg_pos": "",
        },
        "nodes": list(drawn.values()),
        "links": _links(graph, ids),
        "qk_only_nodes": {node["node_id"]: node for node in beside.values()},
    }


def shown_tables(graph: Graph) -> list[AttentionTable]:
    """Attention tables that have a node to be shown at, one each: that against no other key before the others."""
    found: dict[str, AttentionTable] = {}
    for table in sorted(graph.attention, key=lambda table: table.against is not None):
        if table.unit in graph:
            found.setdefault(table.unit, table)
    return list(found.values())


def write_neuronpedia(entries: dict[str, Any], folder: str | Path) -> Path:
    """Write `{slug}.json` and list it in the `graph-metadata.json` beside it, as circuit-tracer's page expects.

    Raises `ClearheadError` when the compressed file is larger than Neuronpedia takes.
    """
    folder, metadata = Path(folder), entries["metadata"]
    text = json.dumps(entries, ensure_ascii=False, allow_nan=False).encode()
    if len(text) > LARGEST and len(gzip.compress(text, 6)) > LARGEST:
        raise ClearheadError(
            f"this graph has {len(entries['links']):,} edges and compresses to more than the {LARGEST // 1_000_000} MB "
            f"that Neuronpedia takes; prune it first"
        )
    index = folder / "graph-metadata.json"
    listed = _listed(index) if index.exists() else []
    file = folder / f"{metadata['slug']}.json"
    with written_aside(file) as aside:
        aside.write_bytes(text)
    write_json(index, {"graphs": [*(g for g in listed if g["slug"] != metadata["slug"]), metadata]})
    return file


def _listed(index: Path) -> list[dict[str, Any]]:
    listed = read_json(index)
    graphs = listed.get("graphs") if isinstance(listed, dict) else None
    if not isinstance(graphs, list) or not all(isinstance(graph, dict) and "slug" in graph for graph in graphs):
        raise CorruptFileError(f"{index} is no list of graphs; move it away, or choose another folder with --out")
    return graphs


class _Nodes:
    """Makes the nodes of one graph."""

    def __init__(self, graph: Graph):
        self.graph = graph
        layers = [unit.layer for unit in graph.units if unit.layer is not None]
        if not layers:
            raise ClearheadError("Neuronpedia draws no graph of tokens and logits alone; nothing has a layer here")
        # its page takes a highest layer of 0 for none
        self.offset = int(max(layers) == 0)
        self.top = max(layers) + self.offset + 1
        self.explained = {(unit.kind, unit.layer) for unit in graph.units if unit.kind in ("error", "attn_error")}
        outputs = [unit for unit in graph.units if unit.kind in ("logit", "target")]
        self.probability = {unit: self._probability_of(unit) for unit in outputs}
        self.likeliest = max(self.probability, key=lambda unit: self.probability[unit], default=None)

    def node(self, unit: Unit) -> dict[str, Any]:
        """The node of a unit of the graph, or of one that is only named in an attention table."""
        place = self.graph.place(unit) if unit in self.graph else None
        known = unit if place is None else self.graph.units[place]
        # a unit of no one position is shown at the first token
        position = 0 if unit.position is None else unit.position
        name = self._id(unit)
        influence = None
        if place is not None and "influence" in self.graph.values:
            influence = _or_null(self.graph.values["influence"][place])
        return {
            "node_id": name,
            "feature": self._number(unit),
            "layer": self._layer(unit),
            "ctx_idx": position,
            "feature_type": self._type(unit),
            "jsNodeId": name,
            "clerp": self._clerp(unit),
            "influence": influence,
            "activation": _or_null(known.activation),
            "token_prob": self.probability.get(unit, 0.0),
            "is_target_logit": unit == self.likeliest,
            "run_idx": 0,
            "reverse_ctx_idx": 0,
            "unit": unit.id,
        }

    def _id(self, unit: Unit) -> str:
        at = "all" if unit.position is None else str(unit.position)
        match unit.kind:
            case "feature" | "lorsa":
                return f"{unit.layer}_{TYPES[unit.kind][:3]}_{unit.index}_{at}"
            case "error":
                return f"{unit.layer}_error_mlp_{at}"
            case "attn_error":
                return f"{unit.layer}_error_attn_{at}"
            case "embedding":
                return f"E_{unit.index}_{at}"
            case kind:
                rest = ".".join(str(number) for number in (unit.index, unit.part) if number is not None)
                layer = self._layer(unit) if unit.layer is None else str(unit.layer)
                return "_".join(word for word in (layer, kind.replace("_", "-"), rest, at) if word)

    def _number(self, unit: Unit) -> int:
        match unit.kind:
            case "feature" | "lorsa":
                return cantor(unit.layer or 0, unit.index or 0)
            case "embedding" | "logit" | "target":
                return unit.index or 0
            case kind:
                # no dashboard: a negative number, another for every other kind and place
                return -1 - list(KINDS).index(kind) - len(KINDS) * cantor(unit.index or 0, unit.part or 0)

    def _layer(self, unit: Unit) -> str:
        match unit.kind:
            case "embedding" | "input":
                return "E"
            case "logit" | "target":
                return str(self.top)
            case _:
                return str((unit.layer or 0) + self.offset)

    def _type(self, unit: Unit) -> str:
        if unit.kind == "mlp" and ("error", unit.layer) not in self.explained:
            return TYPES["error"]
        if unit.kind == "attn" and ("attn_error", unit.layer) not in self.explained:
            return TYPES["attn_error"]
        return TYPES.get(unit.kind, "unknown")

    def _clerp(self, unit: Unit) -> str:
        label = self.graph.labels.get(unit.id)
        token = self.graph.tokens[unit.position] if unit.position is not None and unit.kind == "embedding" else None
        match unit.kind:
            case "logit" | "target":
                words = label or ("target" if unit.kind == "target" else f"token {unit.index}")
                return f'Output "{_quotable(words)}" (p={self.probability.get(unit, 0.0):.3f})'
            case "embedding":
                return f'Emb: "{visible(label or token or str(unit.index))}"'
            case "feature" | "lorsa":
                return visible(label or "")
            case _:
                return visible(label or unit.id)

    def _probability_of(self, unit: Unit) -> float:
        values = self.graph.values.get("probability")
        known = math.nan if values is None else float(values[self.graph.place(unit)])
        if not math.isnan(known):
            return known
        if unit.kind == "target":
            return 1.0
        raise ClearheadError(
            f"{unit} has no probability, which Neuronpedia's page reads; give the graph values={{'probability': ...}}"
        )


def _links(graph: Graph, ids: list[str]) -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = [
        {"source": ids[source], "target": ids[target], "weight": weight}
        for source, target, weight in zip(
            graph.source.tolist(), graph.target.tolist(), graph.weight.tolist(), strict=True
        )
    ]
    if graph.loadings is not None:
        entries = [array.tolist() for array in graph.loadings.arrays().values()]
        for edge, layer, head, weight in zip(*entries, strict=True):
            links[edge].setdefault("head_loadings", []).append([layer, head, weight])
    return links


def _qk(table: AttentionTable, ids: dict[str, str]) -> dict[str, Any]:
    return {
        "pair_wise_contributors": [[ids[query], ids[key], weight] for query, key, weight in table.pairs],
        "top_q_marginal_contributors": [[ids[query], weight] for query, weight in table.queries],
        "top_k_marginal_contributors": [[ids[key], weight] for key, weight in table.keys],
    }


def _metadata(graph: Graph, slug: str, scan: str, dashboards: Dashboards) -> dict[str, Any]:
    provenance = graph.provenance
    influence = graph.values.get("influence")
    highest = 1.0 if influence is None else max((x for x in influence.tolist() if not math.isnan(x)), default=1.0)
    metadata = {
        "slug": slug,
        "scan": scan,
        "schema_version": 1,
        "prompt_tokens": [visible(token) for token in graph.tokens],
        "prompt": provenance.prompt or "".join(graph.tokens),
        # the slider starts where it hides nothing
        "node_threshold": min(1.0, math.ceil(highest * 100) / 100),
        "info": {
            "description": provenance.protocol,
            "generator": {"name": "clearhead", "version": clearhead.__version__},
            "scores": graph.scores,
            "provenance": asdict(provenance),
        },
        "generation_settings": {"model": provenance.model, "protocol": provenance.protocol, "seed": provenance.seed},
    }
    details = dashboards.to_dict()
    return metadata | ({"feature_details": details} if details else {})


def visible(text: str) -> str:
    """Line breaks and tabs as signs, so that a token stays on one line."""
    return text.replace("\r", "↵").replace("\n", "⏎").replace("\t", "→")


def _quotable(token: str) -> str:
    """A token between quotes: the pages cut a label at its quotes and at `(p=`."""
    return visible(token).replace('"', "″").replace("(p=", "( p=")


def _or_null(number: float | None) -> float | None:
    return None if number is None or math.isnan(number) else float(number)
