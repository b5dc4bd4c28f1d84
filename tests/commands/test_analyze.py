import pytest
import torch

from clearhead import cli
from clearhead.atlas import Atlas
from clearhead.config import Analyze, TrainLorsa
from clearhead.dictionaries.init import from_attention
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.runs import RunDirectory

NAME, HEADS = "clearhead-tiny", 128


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """A directory of two layers, whose Lorsas are their original heads; the second was not trained to its end."""
    place = tmp_path_factory.mktemp("layers")
    text = place / "texts"
    text.mkdir()
    for name, word in (("a", "cat"), ("b", "dog"), ("c", "owl")):
        (text / f"{name}.txt").write_text("\n".join(f"The {word} saw the {word} of day {i * i}." for i in range(200)))
    model = Model.load(NAME)
    for layer in (0, 1):
        lorsa = from_attention(model.weights(layer), model.geometry(layer))
        sites = {"input_site": f"attn_in.{layer}", "output_site": f"attn_out.{layer}"}
        lorsa.provenance = {"model": NAME, "layer": layer} | sites
        lorsa.save_pretrained(place / "dictionaries" / str(layer))
        config = TrainLorsa(model=NAME, layer=layer, context=32, text=str(text), heads=HEADS, groups=4, k=8)
        with RunDirectory(place / "runs" / str(layer)) as directory:
            directory.write_config(config.to_dict())
        if layer == 0:
            lorsa.save_pretrained(place / "runs" / "0" / "lorsa")
    other = from_attention(model.weights(1), model.geometry(1))
    other.provenance = {"model": "org/other", "layer": 1} | sites
    other.save_pretrained(place / "dictionaries" / "other")
    return place


def test_each_layer_gets_an_atlas_and_one_that_fails_is_named(layers, capsys):
    above = str(layers / "dictionaries" / "1")
    command = ["analyze", str(layers / "runs"), "--tokens", "96", "--device", "cpu", "--dictionaries", above]
    assert cli.main([*command, "--explain-heads", "3"]) == 0
    printed = capsys.readouterr().out
    assert f"layer 0: {layers / 'runs' / '0' / 'atlas'}" in printed
    assert "layer 1 left out: " in printed
    assert "has not been trained to its end" in printed
    atlas = Atlas(layers / "runs" / "0" / "atlas")
    found = atlas.sql(
        "select distinct relation, split_part(other, '.', 1) as kind, share is null as plain from relations"
    )
    kinds = {(row["relation"], row["kind"], row["plain"]) for row in found}
    assert {("reads", "embedding", True), ("writes", "lorsa", True), ("modes", "mode", True)} <= kinds
    assert {("query", "embedding", False), ("key", "offset", False)} & kinds  # statistics
    split = atlas.sql("select distinct unit_id from relations where relation = 'key' and share is null")
    assert [row["unit_id"] for row in split] == ["lorsa.0.3"]  # the head to explain
    assert torch.tensor([row["overlap"] for row in atlas.sql("select overlap from families")]).ge(0.7).all()


def test_dictionaries_of_another_model_are_refused_by_name(layers, capsys):
    other = str(layers / "dictionaries" / "other")
    command = ["analyze", str(layers / "runs" / "0"), "--tokens", "256", "--device", "cpu", "--dictionaries", other]
    assert cli.main(command) == 2
    assert f"{other} was trained on org/other" in capsys.readouterr().err


def test_bad_numbers_are_refused(layers):
    with pytest.raises(ClearheadError, match="--explain-heads"):
        Analyze(run=layers, explain_heads="all")
    with pytest.raises(ClearheadError, match="--out is for one run"):
        from clearhead.commands import analyze

        analyze.run(Analyze(run=layers / "runs", out=layers / "atlas"))
