import json

import networkx
import numpy as np
import pytest

from clearhead.cli import main
from clearhead.units import AttentionTable, Graph, Loadings, Provenance, Supernode, Unit
from clearhead.units.bundle import load_graph, save_graph


def graph(weight=2.0, extra=(), tokens=("a", "b")):
    last = len(tokens) - 1
    units = [
        Unit("embedding", index=5, position=last - 1),
        Unit("feature", 0, 3, last),
        Unit("lorsa", 1, 3, last),
        *extra,
        Unit("logit", index=9, position=last),
    ]
    n = len(units) - 1
    return Graph(
        units,
        list(range(n)),
        [n] * n,
        [weight, *range(1, n)],
        Provenance("clearhead-tiny", "direct effect", "".join(tokens)),
        values={"probability": [np.nan] * n + [0.5]},
        loadings=Loadings([0, 1], [0, 1], [1, 2], [weight, 1.0], "order 1"),
        attention=[AttentionTable(f"edge.1.2.0@{last}", 1.0, 1.0), AttentionTable(f"lorsa.1.3@{last}", 1.0, 1.0)],
        supernodes=[Supernode("pair", (f"feature.0.3@{last}", f"lorsa.1.3@{last}"))],
        tokens=tokens,
    )


@pytest.fixture
def saved(tmp_path):
    """Two runs, the second with one more unit."""
    save_graph(graph(), tmp_path / "dense" / "graph")
    save_graph(graph(-4.0, [Unit("head", 1, 0, 1)]), tmp_path / "sparse")
    return tmp_path


def test_diff_prints_what_differs_and_writes_the_difference(saved, capsys):
    run = ["graph", "diff", str(saved / "dense"), str(saved / "sparse"), "--out", str(saved / "less")]
    assert main(run) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "units 4 5 4 0.800" in lines
    assert not any("measured" in line for line in lines)
    assert "edges 3 4 3 0.750" in lines
    assert "head.1.0@1 – 3.000" in lines
    assert "embedding.5@0 → logit.9@1 2.000 -4.000" in lines
    assert "head.0.1 0.667 0.800" in lines
    assert load_graph(saved / "less").weights_between("embedding.5@0", "logit.9@1") == 6
    assert main([*run, "--dry-run"]) == 0
    assert "second, edges" in capsys.readouterr().out


def test_merge_writes_the_mean(saved, capsys):
    save_graph(graph(4.0, tokens=("x", "a", "b")), saved / "long")
    run = ["graph", "merge", str(saved / "dense"), str(saved / "long"), "--out", str(saved / "m")]
    assert main([*run, "--from-end"]) == 0
    assert "edges before" in capsys.readouterr().out
    merged = load_graph(saved / "m")
    assert merged.weights_between("embedding.5@1", "logit.9@2") == 3
    assert merged.tokens == ("⋯", "a", "b")
    assert main(run) == 0
    assert len(load_graph(saved / "m").units) == 8
    assert main(["graph", "merge", str(saved / "dense")]) == 2
    assert "two graphs at least" in capsys.readouterr().err


def test_export_to_neuronpedia(saved, capsys):
    run = ["graph", "export", str(saved / "dense"), "--source-set", "tc", "--scan", "gpt2"]
    assert main(run) == 0
    shown = capsys.readouterr().out
    assert [line.split()[-1] for line in shown.splitlines() if "left out" in line] == ["1"]
    made = json.loads((saved / "dense-neuronpedia" / "dense.json").read_text())
    assert (made["metadata"]["scan"], made["metadata"]["feature_details"]) == ("gpt2", {"neuronpedia_source_set": "tc"})
    assert len(made["links"]) == 3
    assert main([*run, "--format", "graphml"]) == 2
    assert "--scan means nothing here" in capsys.readouterr().err
    assert main([*run, "--features-url", "https://x"]) == 2


def test_export_to_graphml_and_to_a_folder(saved, capsys):
    assert main(["graph", "export", str(saved / "sparse"), "--format", "graphml"]) == 0
    assert len(networkx.read_graphml(saved / "sparse.graphml")) == 5
    file = saved / "one.json"
    file.write_text(json.dumps(graph().to_dict()))
    assert main(["graph", "export", str(file), "--format", "bundle"]) == 0
    assert load_graph(saved / "one-bundle").units == graph().units
    assert main(["graph", "export", str(file), "--format", "bundle", "--dry-run"]) == 0
    assert "one-bundle" in capsys.readouterr().out


def test_export_and_diff_of_circuits_of_heads_and_mlps(saved, capsys):
    units = [Unit("input"), Unit("head_q", 1, 3), Unit("mlp", 0), Unit("target", index=0)]
    circuit = Graph(units, [0, 2], [1, 3], [1.0, 2.0], Provenance("clearhead-tiny", "p"))
    save_graph(circuit, saved / "c")
    assert main(["graph", "export", str(saved / "c"), "--format", "mib"]) == 0
    made = json.loads((saved / "c-mib.json").read_text())
    assert made["cfg"] == {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 128}
    assert main(["graph", "diff", str(saved / "c"), str(saved / "c-mib.json")]) == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).count("edges 2 2 2 1.000") == 1
    assert "Their weights are not measured alike:\nA: p\nB: scores of c-mib.json" in shown
    assert main(["view", str(saved / "c-mib.json")]) == 0
    assert "head_q.1.3" in (saved / "c-mib.html").read_text()
    save_graph(Graph(units, [0, 2], [1, 3], [1.0, 2.0], Provenance("several models", "p")), saved / "c")
    assert main(["graph", "export", str(saved / "c"), "--format", "mib"]) == 2
    assert "cannot be opened" in capsys.readouterr().err


def test_what_is_no_graph_is_refused(saved, capsys):
    assert main(["graph", "diff", str(saved), str(saved / "sparse")]) == 2
    assert "holds no graph" in capsys.readouterr().err
    (saved / "sparse" / "graph.safetensors").write_bytes(b"x")
    assert main(["graph", "export", str(saved / "sparse")]) == 2
    assert "truncated" in capsys.readouterr().err
