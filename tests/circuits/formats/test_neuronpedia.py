import json
import re

import numpy as np
import pytest

from clearhead.circuits.formats.neuronpedia import Dashboards, cantor, speakable, to_neuronpedia, write_neuronpedia
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.units import AttentionTable, Graph, Loadings, Provenance, Supernode, Unit

NAME = {"type": "string", "pattern": r"^[A-Za-z0-9_.-]+$"}
TEXT, NUMBER, NULLABLE = {"type": "string"}, {"type": "number"}, {"type": ["number", "null"]}
NODE = {
    "type": "object",
    "required": ["node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId", "clerp"],
    "properties": {
        "node_id": NAME,
        # the schema of Neuronpedia allows null, the page of circuit-tracer does not
        "feature": {"type": "integer"},
        "layer": {"type": "string", "pattern": r"^(E|[0-9]+)$"},
        "ctx_idx": {"type": "integer", "minimum": 0},
        "feature_type": {
            "enum": [
                "cross layer transcoder", "mlp reconstruction error", "lorsa", "lorsa error", "embedding", "logit",
                "bias", "unknown",
            ]
        },
        "jsNodeId": TEXT,
        "clerp": TEXT,
        "influence": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "activation": NULLABLE,
        "token_prob": {"type": "number", "minimum": 0, "maximum": 1},
        "is_target_logit": {"type": "boolean"},
        "run_idx": {"type": "integer"},
        "reverse_ctx_idx": {"type": "integer"},
        "qk_tracing_results": {
            "type": "object",
            "required": ["pair_wise_contributors", "top_q_marginal_contributors", "top_k_marginal_contributors"],
            "properties": {
                "pair_wise_contributors": {"type": "array", "items": {"type": "array", "tuple": [TEXT, TEXT, NUMBER]}},
                "top_q_marginal_contributors": {"type": "array", "items": {"type": "array", "tuple": [TEXT, NUMBER]}},
                "top_k_marginal_contributors": {"type": "array", "items": {"type": "array", "tuple": [TEXT, NUMBER]}},
            },
        },
    },
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "required": ["metadata", "qParams", "nodes", "links"],
    "properties": {
        "metadata": {
            "type": "object",
            "required": ["slug", "scan", "prompt_tokens", "prompt"],
            "properties": {
                "slug": NAME,
                "scan": NAME,
                "schema_version": {"enum": [1]},
                "prompt_tokens": {"type": "array", "items": TEXT},
                "prompt": TEXT,
                "node_threshold": {"type": "number", "minimum": 0, "maximum": 1},
                "feature_details": {
                    "type": "object",
                    "properties": {
                        "feature_json_base_url": TEXT,
                        "neuronpedia_source_set": TEXT,
                        "neuronpedia_lorsa_source_set": TEXT,
                    },
                },
                "info": {
                    "type": "object",
                    "properties": {
                        "description": TEXT,
                        "generator": {"type": "object", "properties": {"name": TEXT, "version": TEXT}},
                    },
                },
                "generation_settings": {"type": "object"},
            },
        },
        "qParams": {
            "type": "object",
            "properties": {
                "pinnedIds": {"type": "array", "items": TEXT},
                "supernodes": {"type": "array", "items": {"type": "array", "items": TEXT}},
                "linkType": {"enum": ["both"]},
                "clickedId": TEXT,
                "sg_pos": TEXT,
            },
        },
        "nodes": {"type": "array", "items": NODE},
        "links": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["source", "target", "weight"],
                "properties": {"source": TEXT, "target": TEXT, "weight": NUMBER},
            },
        },
        "qk_only_nodes": {"type": "object", "values": NODE},
    },
}
"""The fields of a graph and their types, as far as the two pages rely on them."""

TYPES = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "boolean": bool}


def violations(value, schema, at="graph"):
    """Where `value` is not as the schema says; booleans are no numbers."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = [value is None if kind == "null" else isinstance(value, TYPES[kind]) for kind in kinds]
    if kinds and (not any(fits) or (isinstance(value, bool) and "boolean" not in kinds)):
        return [f"{at} is {value!r}, not {kinds}"]
    found = [f"{at} lacks {name}" for name in schema.get("required", []) if name not in value]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at} is {value!r}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{at} is {value!r}")
    if "minimum" in schema and value is not None and not schema["minimum"] <= value <= schema.get("maximum", value):
        found.append(f"{at} is {value}")
    parts = [(value[name], part, name) for name, part in schema.get("properties", {}).items() if name in value]
    parts += [(item, schema["items"], i) for i, item in enumerate(value)] if "items" in schema else []
    parts += [(item, schema["values"], name) for name, item in value.items()] if "values" in schema else []
    if "tuple" in schema:
        if len(value) != len(schema["tuple"]):
            found.append(f"{at} has {len(value)} parts")
        parts += list(zip(value, schema["tuple"], range(len(value)), strict=False))
    return found + [line for item, part, name in parts for line in violations(item, part, f"{at}.{name}")]


def graph(top=1, **said):
    units = [
        Unit("embedding", index=5, position=0),
        Unit("embedding", index=6, position=1),
        Unit("feature", 0, 3, 1, activation=2.0),
        Unit("error", 0, position=1),
        Unit("lorsa", top, 3, 1, activation=0.5),
        Unit("attn_error", top, position=1),
        Unit("mlp", 0, position=1),
        Unit("bias", 0),
        Unit("head", top, 2, 1),
        Unit("logit", index=9, position=1),
        Unit("target", index=0, position=1),
    ]
    table = AttentionTable(
        f"lorsa.{top}.3@1", 1.0, 1.0, None,
        (("feature.0.3@1", "embedding.5@0", 0.75), ("feature.0.8@1", "bias.0", 0.25)),
        (("feature.0.3@1", 0.75), ("feature.0.8@1", 0.25)), (("embedding.5@0", 0.75), ("bias.0", 0.25)),
    )  # fmt: skip
    n = len(units)
    given = {
        "values": {
            "influence": [0.99, 0.5, 0.3, 0.9, 0.2, 0.95, 0.6, np.nan, 0.4, 0, 0],
            "probability": [np.nan] * (n - 2) + [0.9126, np.nan],
        },
        "loadings": Loadings([1, 1], [0, 1], [2, 3], [0.1, 0.3], "order 1"),
        "attention": [AttentionTable("edge.1.2.0@1", 1.0, 1.0), table],
        "supernodes": [Supernode("thing", ("feature.0.3@1", f"lorsa.{top}.3@1"))],
        "scores": {"replacement": 0.7},
        "tokens": ["a\n", ' "b'],
        "labels": {"logit.9@1": ' "c" (p=', "feature.0.3@1": "quotes", "target.0@1": "b - c"},
    } | said
    provenance = Provenance("org/toy model", "direct effect", 'a\n "b', (5, 6), {"torch": "2"}, 3)
    source = list(range(n - 2)) * 2
    target = [n - 2] * (n - 2) + [n - 1] * (n - 2)
    return Graph(units, source, target, np.linspace(-1, 1, len(source)), provenance, **given)


def nodes_of(entries):
    return {node["unit"]: node for node in entries["nodes"]}


def test_a_graph_validates_and_all_its_names_resolve():
    made = json.loads(json.dumps(to_neuronpedia(graph(), "a-b", "gpt2", Dashboards(None, "tc", "lorsa"))))
    assert violations(made, SCHEMA) == []
    ids = {node["node_id"] for node in made["nodes"]}
    assert len(ids) == len(made["nodes"]) == 11
    assert all(link["source"] in ids and link["target"] in ids for link in made["links"])
    assert len(made["links"]) == 18
    assert made["links"][1]["head_loadings"] == [[0, 2, 0.1], [1, 3, 0.3]]
    assert made["qParams"]["supernodes"] == [["thing", "0_cro_3_1", "1_lor_3_1"]]
    assert made["qParams"]["pinnedIds"] == ["0_cro_3_1", "1_lor_3_1"]
    results = nodes_of(made)["lorsa.1.3@1"]["qk_tracing_results"]
    assert results["pair_wise_contributors"] == [["0_cro_3_1", "E_5_0", 0.75], ["0_cro_8_1", "0_bias_all", 0.25]]
    assert results["top_q_marginal_contributors"] == [["0_cro_3_1", 0.75], ["0_cro_8_1", 0.25]]
    assert results["top_k_marginal_contributors"] == [["E_5_0", 0.75], ["0_bias_all", 0.25]]
    assert list(made["qk_only_nodes"]) == ["0_cro_8_1"]
    assert made["metadata"]["feature_details"] == {
        "neuronpedia_source_set": "tc",
        "neuronpedia_lorsa_source_set": "lorsa",
    }
    assert made["metadata"]["info"]["scores"] == {"replacement": 0.7}
    assert made["metadata"]["info"]["provenance"]["token_ids"] == [5, 6]


def test_the_schema_refuses_what_it_should():
    made = to_neuronpedia(graph(), "a-b", "gpt2")
    made["nodes"][0]["feature"] = None
    made["nodes"][1]["feature_type"] = "head"
    made["links"][0]["weight"] = "1"
    made["metadata"]["slug"] = "a b"
    del made["nodes"][2]["clerp"]
    assert violations(made, SCHEMA) == [
        "graph.metadata.slug is 'a b'",
        "graph.nodes.0.feature is None, not ['integer']",
        "graph.nodes.1.feature_type is 'head'",
        "graph.nodes.2 lacks clerp",
        "graph.links.0.weight is '1', not ['number']",
    ]


def test_kinds_labels_and_numbers_are_those_that_the_pages_read():
    nodes = nodes_of(to_neuronpedia(graph(), "s", "gpt2"))
    types = {unit: node["feature_type"] for unit, node in nodes.items()}
    assert types["feature.0.3@1"] == "cross layer transcoder"
    assert (types["lorsa.1.3@1"], types["attn_error.1@1"]) == ("lorsa", "lorsa error")
    assert (types["error.0@1"], types["bias.0"], types["head.1.2@1"]) == ("mlp reconstruction error", "bias", "unknown")
    assert types["target.0@1"] == "logit"
    # beside an error the MLP is what its skip connection writes; alone it is unexplained
    assert types["mlp.0@1"] == "unknown"
    units = ["embedding.5@0", "mlp.0@1", "logit.9@1"]
    alone = graph(attention=(), loadings=None, supernodes=()).restrict(units)
    assert nodes_of(to_neuronpedia(alone, "s", "m"))["mlp.0@1"]["feature_type"] == "mlp reconstruction error"

    logit, target = nodes["logit.9@1"], nodes["target.0@1"]
    assert logit["clerp"] == 'Output " ″c″ ( p=" (p=0.913)'
    assert float(logit["clerp"].split("(p=")[1].split(")")[0]) == 0.913
    assert (logit["token_prob"], logit["is_target_logit"]) == (0.9126, False)
    assert (target["clerp"], target["is_target_logit"]) == ('Output "b - c" (p=1.000)', True)
    assert nodes["feature.0.3@1"]["clerp"] == "quotes"
    assert nodes["feature.0.3@1"]["feature"] == cantor(0, 3) == 9
    assert nodes["lorsa.1.3@1"]["feature"] == cantor(1, 3) == 13
    assert nodes["bias.0"]["influence"] is None
    places = [(node["layer"], node["feature"], node["ctx_idx"]) for node in nodes.values()]
    assert len(set(places)) == len(places)


def test_cantor_numbers_are_those_the_page_inverts():
    for layer in range(20):
        for index in (0, 1, 17, 24_575, 10**6):
            number = cantor(layer, index)
            diagonal = int(((8 * number + 1) ** 0.5 - 1) // 2)
            assert number - diagonal * (diagonal + 1) // 2 == index
            assert diagonal - index == layer


def test_error_ids_do_not_collide_with_features():
    units = [Unit("error", 3, position=5), Unit("feature", 0, 3, 5), Unit("attn_error", 3, position=5)]
    units += [Unit("embedding", index=3, position=5), Unit("lorsa", 0, 3, 5), Unit("mlp", 3, position=5)]
    made = to_neuronpedia(Graph(units, [], [], [], Provenance("m", "p"), tokens="abcdef"), "s", "m")
    assert len({node["node_id"] for node in made["nodes"]}) == len(units)


def test_a_model_of_one_layer_is_shown_at_layer_1():
    nodes = nodes_of(to_neuronpedia(graph(top=0, attention=()), "s", "m"))
    assert nodes["feature.0.3@1"]["layer"] == "1"
    assert nodes["feature.0.3@1"]["feature"] == cantor(0, 3)
    assert nodes["logit.9@1"]["layer"] == "2"
    assert nodes_of(to_neuronpedia(graph(), "s", "m"))["feature.0.3@1"]["layer"] == "0"


def test_the_slider_starts_where_nothing_is_hidden():
    assert to_neuronpedia(graph(), "s", "m")["metadata"]["node_threshold"] == 0.99
    values = {"probability": graph().values["probability"]}
    assert to_neuronpedia(graph(values=values), "s", "m")["metadata"]["node_threshold"] == 1


def test_a_table_against_another_key_gives_way():
    against = AttentionTable("lorsa.1.3@1", 5.0, 5.0, 0, (("bias.0", "bias.0", 5.0),))
    made = to_neuronpedia(graph(attention=[against, *graph().attention]), "s", "m")
    assert len(nodes_of(made)["lorsa.1.3@1"]["qk_tracing_results"]["pair_wise_contributors"]) == 2


def test_files_lie_where_the_local_page_looks(tmp_path):
    made = to_neuronpedia(graph(), "first", "m")
    file = write_neuronpedia(made, tmp_path)
    assert file == tmp_path / "first.json"
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(made))
    write_neuronpedia(to_neuronpedia(graph(), "second", "m"), tmp_path)
    write_neuronpedia(made, tmp_path)
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [entry["slug"] for entry in listed] == ["second", "first"]
    (tmp_path / "graph-metadata.json").write_text("[]")
    with pytest.raises(CorruptFileError, match="no list of graphs"):
        write_neuronpedia(made, tmp_path)


def test_a_graph_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("clearhead.circuits.formats.neuronpedia.LARGEST", 500)
    with pytest.raises(ClearheadError, match="18 edges"):
        write_neuronpedia(to_neuronpedia(graph(), "s", "m"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_the_pages_could_not_open_is_refused():
    with pytest.raises(ClearheadError, match=r"slug 'a b/ü': .* as in 'a-b'"):
        to_neuronpedia(graph(), "a b/ü", "m")
    with pytest.raises(ClearheadError, match="scan"):
        to_neuronpedia(graph(), "a", "org/m")
    with pytest.raises(ClearheadError, match="tokens="):
        to_neuronpedia(graph(tokens=()), "a", "m")
    with pytest.raises(ClearheadError, match=r"logit\.9@1 has no probability"):
        to_neuronpedia(graph(values={}), "a", "m")
    with pytest.raises(ClearheadError, match="tokens and logits alone"):
        to_neuronpedia(graph().restrict(["embedding.5@0", "logit.9@1"]), "a", "m")
    with pytest.raises(ClearheadError, match="one place"):
        Dashboards("https://x", "y")
    assert speakable("org/toy model?") == "org-toy-model"
    assert speakable("???") == "graph"
