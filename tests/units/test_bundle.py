import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.units import AttentionTable, Graph, Loadings, Provenance, Supernode, Unit
from clearhead.units.bundle import load_graph, save_graph


@pytest.fixture
def graph():
    units = [
        Unit("embedding", index=5, position=0, activation=1 / 3),
        Unit("feature", 0, 7, 1, activation=2.5e-300),
        Unit("lorsa", 1, 2, 1),
        Unit("logit", index=9, position=1),
    ]
    return Graph(
        units,
        [0, 1, 2],
        [1, 2, 3],
        [0.1, -1e-17, 3.0],
        Provenance("toy", "direct effect", "a b", (5, 6), {"torch": "2"}, 3, (Provenance("toy", "p"),)),
        values={"influence": [0.1, 0.5, 0.9, np.nan], "probability": [np.nan] * 3 + [0.25]},
        loadings=Loadings([0, 0, 2], [0, 1, 1], [3, 0, 0], [0.05, 0.05, 3.0], "order 1"),
        attention=[
            AttentionTable(
                "lorsa.1.2@1", 0.7, 0.6, None, (("feature.0.7@1", "embedding.5@0", 0.6),), (("feature.0.7@1", 0.6),),
                (("bias.0", 0.6),), (("feature.0.7@1", 2, "embedding.5@0", 0.6),),
            )
        ],
        supernodes=[Supernode("both", ("feature.0.7@1", "lorsa.1.2@1"))],
        scores={"replacement": 0.8},
        tokens=["</script>", "\u202e b"],
        labels={"logit.9@1": ' "x"'},
    )  # fmt: skip


def same(a, b):
    assert a.units == b.units
    assert [unit.activation for unit in a.units] == [unit.activation for unit in b.units]
    for name in ("source", "target", "weight"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
    assert a.values.keys() == b.values.keys()
    for name in a.values:
        np.testing.assert_array_equal(a.values[name], b.values[name])
    for name in ("edge", "layer", "head", "weight"):
        np.testing.assert_array_equal(a.loadings.arrays()[name], b.loadings.arrays()[name])
    assert a.loadings.kind == b.loadings.kind
    for name in ("provenance", "attention", "supernodes", "scores", "tokens", "labels"):
        assert getattr(a, name) == getattr(b, name)


def test_a_graph_comes_back_bit_for_bit(graph, tmp_path):
    same(load_graph(save_graph(graph, tmp_path / "g")), graph)
    assert sorted(file.name for file in (tmp_path / "g").iterdir()) == ["graph.json", "graph.safetensors"]


def test_one_json_file_is_read_too(graph, tmp_path):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(graph.to_dict()))
    same(load_graph(file), graph)


def test_a_graph_without_annotations_or_edges(tmp_path):
    empty = Graph([], [], [], [], Provenance("m", "p"))
    again = load_graph(save_graph(empty, tmp_path))
    assert (again.units, len(again), again.loadings, again.annotated) == ((), 0, None, [])


def test_format_1_is_read(tmp_path):
    old = {
        "format": 1, "provenance": {"model": "m", "protocol": "p"}, "units": ["head.0.1", "logit.3@1"],
        "activation": [None, 2], "source": [0], "target": [1], "weight": [1.5],
    }  # fmt: skip
    graph = Graph.from_dict(old)
    assert graph.weights_between("head.0.1", "logit.3@1") == 1.5
    assert graph.unit("logit.3@1").activation == 2
    assert graph.annotated == []


def test_missing_and_truncated_files_are_named(graph, tmp_path):
    with pytest.raises(ClearheadError, match="no file"):
        load_graph(tmp_path / "none")
    with pytest.raises(ClearheadError, match=r"holds no graph\.json"):
        load_graph(tmp_path)
    folder = save_graph(graph, tmp_path / "g")
    whole = (folder / "graph.safetensors").read_bytes()
    for cut in (0, 5, 100, len(whole) - 8):
        (folder / "graph.safetensors").write_bytes(whole[:cut])
        with pytest.raises(CorruptFileError, match=r"graph\.safetensors is truncated"):
            load_graph(folder)
    (folder / "graph.safetensors").unlink()
    with pytest.raises(CorruptFileError, match="missing"):
        load_graph(folder)
    text = (folder / "graph.json").read_text()
    (folder / "graph.json").write_text(text[: len(text) // 2])
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        load_graph(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown entry 'extra'"),
        ({"format": 7}, "format 7"),
        ({"units": ["lorsa.1.2@1"]}, "4 activations"),
        ({"units": 3}, "units: expected a list"),
        ({"units": ["embedding.5@0", "feature.0.7@1", "lorsa.1.2@1", "logit." + "9" * 5000]}, "does not name a unit"),
        ({"units": ["embedding.5@0", "feature.0.7@1", "lorsa.1.2@1", None]}, "expected a text"),
        ({"tokens": [1, 2]}, "tokens: expected a text"),
        ({"tokens": ["a"]}, "1 tokens but 2 token ids"),
        ({"scores": {"replacement": "high"}}, "expected numbers"),
        ({"scores": [1]}, "scores: expected a table"),
        ({"labels": {"logit.9@1": 4}}, "label of logit.9@1: expected a text"),
        ({"supernodes": [{"name": "x", "units": ["head.0.0"]}]}, "head.0.0"),
        ({"supernodes": [{"name": "x"}]}, "lacks units"),
        ({"attention": [{"unit": "lorsa.1.2@1"}]}, "lacks score, total"),
        ({"attention": [{"unit": "lorsa.1.2@1", "score": 1, "total": 1, "pairs": [["a", 1]]}]}, "3 parts"),
        ({"attention": [{"unit": "lorsa.1.2@1", "score": 1, "total": 1, "pairs": 3}]}, "expected a list of lists"),
        ({"attention": [{"unit": "head.1.2", "score": 1, "total": 1}]}, "explains an attention edge"),
        ({"attention": [{"unit": "lorsa.1.2@1", "score": "x", "total": 1}]}, "score"),
        ({"values": ["influence", "probability", "size"]}, r"lacks values\.size"),
        ({"values": 3}, "list of names"),
        ({"loadings": None}, r"unknown entry 'loadings"),
        ({"provenance": {"model": "m"}}, "protocol"),
        ({"provenance": []}, "provenance"),
        ({"provenance": {"model": "m", "protocol": "p", "token_ids": 5}}, "token_ids"),
        ({"provenance": {"model": "m", "protocol": "p", "parents": [3]}}, "got int"),
    ],
)  # fmt: skip
def test_altered_names_are_refused(graph, tmp_path, change, message):
    folder = save_graph(graph, tmp_path)
    names = json.loads((folder / "graph.json").read_text())
    (folder / "graph.json").write_text(json.dumps(names | change))
    with pytest.raises(CorruptFileError, match=message):
        load_graph(folder)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("weight", np.ones(3, dtype=np.float32), "weight must be a list of float64; got float32"),
        ("weight", np.ones((3, 1)), "shape"),
        ("weight", np.array([1.0, np.nan, 1]), "has weight nan"),
        ("source", np.array([0, 1]), "one length"),
        ("source", np.array([0, 1, 9]), "edge 2 has source 9"),
        ("values.influence", np.ones(3), "there are 4 units"),
        ("loadings.edge", np.array([0, 0, 3]), "edge 3"),
        ("loadings.head", np.array([0]), "one length"),
        ("loadings.head", np.array([0, -1, 0]), "counts from 0"),
        ("more", np.ones(1), "unknown entry 'more'"),
    ],
)
def test_altered_arrays_are_refused(graph, tmp_path, name, array, message):
    folder = save_graph(graph, tmp_path)
    arrays = load_file(folder / "graph.safetensors")
    save_file(arrays | {name: array}, folder / "graph.safetensors")
    with pytest.raises(CorruptFileError, match=message):
        load_graph(folder)
