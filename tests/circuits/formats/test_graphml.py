import json
from xml.etree import ElementTree as Xml

import networkx
import numpy as np

from clearhead.circuits.formats.graphml import to_graphml, write_graphml
from clearhead.units import Graph, Loadings, Provenance, Supernode, Unit


def graph():
    units = [
        Unit("embedding", index=5, position=0),
        Unit("edge", 1, 2, 1, 0, activation=1 / 3),
        Unit("logit", index=9, position=1),
    ]
    return Graph(
        units,
        [0, 1, 0],
        [1, 2, 2],
        [0.1, -1e-17, 3.0],
        Provenance("toy", "direct <effect>", "a & \x00b", (5, 6)),
        values={"influence": [0.1, np.nan, 0.0]},
        loadings=Loadings([0, 0], [0, 1], [3, 0], [0.25, 0.5], "order 1"),
        supernodes=[Supernode("a]]>", ("edge.1.2.0@1",)), Supernode("b", ("edge.1.2.0@1",))],
        scores={"replacement": 0.8},
        tokens=["</data>", "\x1b\ud7ff"],
        labels={"logit.9@1": "\x07 &c"},
    )


def test_networkx_reads_every_number_back(tmp_path):
    read = networkx.read_graphml(write_graphml(graph(), tmp_path / "g.graphml"))
    assert read.is_directed()
    assert not read.is_multigraph()
    assert {(s, t): data["weight"] for s, t, data in read.edges(data=True)} == {
        ("embedding.5@0", "edge.1.2.0@1"): 0.1,
        ("edge.1.2.0@1", "logit.9@1"): -1e-17,
        ("embedding.5@0", "logit.9@1"): 3.0,
    }
    edge = read.nodes["edge.1.2.0@1"]
    assert {name: edge[name] for name in ("kind", "layer", "index", "part", "position", "activation")} == {
        "kind": "edge", "layer": 1, "index": 2, "part": 0, "position": 1, "activation": 1 / 3,
    }  # fmt: skip
    assert json.loads(edge["supernodes"]) == ["a]]>", "b"]
    assert "value:influence" not in edge
    assert read.nodes["embedding.5@0"]["value:influence"] == 0.1
    assert "layer" not in read.nodes["embedding.5@0"]
    assert read.nodes["logit.9@1"]["label"] == "\ufffd &c"
    assert json.loads(read.edges["embedding.5@0", "edge.1.2.0@1"]["head_loadings"]) == [[0, 3, 0.25], [1, 0, 0.5]]
    assert json.loads(read.graph["provenance"])["prompt"] == "a & \x00b"
    assert json.loads(read.graph["tokens"]) == list(graph().tokens)
    assert json.loads(read.graph["scores"]) == {"replacement": 0.8}


def test_keys_stand_before_the_graph_and_all_data_have_one():
    root = Xml.fromstring(to_graphml(graph()))
    space = "{http://graphml.graphdrawing.org/xmlns}"
    assert [child.tag for child in root][-1] == f"{space}graph"
    keys = {key.get("id"): key.get("for") for key in root.iter(f"{space}key")}
    for kind in ("node", "edge"):
        data = [entry.get("key") for element in root.iter(space + kind) for entry in element]
        assert data
        assert all(keys[key] == kind for key in data)


def test_an_empty_graph_is_a_document(tmp_path):
    empty = Graph([], [], [], [], Provenance("m", "p"))
    assert len(networkx.read_graphml(write_graphml(empty, tmp_path / "g.graphml"))) == 0
