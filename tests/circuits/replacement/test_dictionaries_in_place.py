"""Dictionaries in place: each stands where its provenance says, and nowhere else."""

import dataclasses

import pytest
import torch

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.dictionaries.clt import Clt
from clearhead.errors import ClearheadError
from tests.circuits.opened_prompts import dictionaries, lorsa, model_of, transcoder


def test_dictionaries_are_found_by_layer_and_kept_as_they_are():
    model = model_of("llama")
    given = [transcoder(model, 1), lorsa(model, 0)]
    placed = Dictionaries(model, given)
    assert (list(placed.mlp), list(placed.attention), placed.clt) == ([1], [0], None)
    assert placed.mlp_layers == [1] and len(placed) == 2
    assert placed.mlp[1].W_enc.dtype == torch.float64 and given[0].W_enc.dtype == torch.float32
    assert placed.describe() == ["transcoder at layer 1, 48 features", "Lorsa at layer 0, 32 heads"]


def test_a_cross_layer_transcoder_stands_for_all_mlps_alone():
    model = model_of("llama")
    placed = Dictionaries(model, dictionaries(model, "clt"))
    assert placed.mlp_layers == [0, 1] and [layer for layer, _ in placed.decoders(0)] == [0, 1]
    assert "cross-layer" in placed.describe()[0]
    for both in (
        [*dictionaries(model, "clt"), transcoder(model, 0)],
        [transcoder(model, 0), *dictionaries(model, "clt")],
    ):
        with pytest.raises(ClearheadError, match="imitates every MLP"):
            Dictionaries(model, both)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"model": "another"}, "trained on another"),
        ({"model": None}, "does not name"),
        ({"layer": 7}, "belongs to layer 7"),
        ({"output_site": "mlp_out.0"}, "to stand in a graph"),
        ({"input_site": "resid_post.1", "output_site": "resid_post.1"}, "to stand in a graph"),
    ],
)
def test_dictionaries_of_other_models_layers_and_sites_are_refused(wrong, reason):
    model = model_of("llama")
    dictionary = transcoder(model, 1)
    dictionary.provenance |= wrong
    with pytest.raises(ClearheadError, match=reason):
        Dictionaries(model, [dictionary])


@pytest.mark.parametrize("reads", ["resid_mid.*", None])
def test_a_cross_layer_transcoder_that_reads_something_else_is_refused(reads):
    model = model_of("llama")
    (clt,) = dictionaries(model, "clt")
    clt.provenance["input_site"] = reads
    with pytest.raises(ClearheadError, match=r"has to read mlp_in\.\*"):
        Dictionaries(model, [clt])


def test_a_cross_layer_transcoder_of_another_width_is_refused():
    model = model_of("llama")
    (given,) = dictionaries(model, "clt")
    narrow = Clt(dataclasses.replace(given.config, d_model=16), given.provenance)
    with pytest.raises(ClearheadError, match="writes 16 numbers"):
        Dictionaries(model, [narrow])


def test_two_in_one_place_are_refused():
    model = model_of("llama")
    with pytest.raises(ClearheadError, match="two dictionaries stand for the MLP of layer 1"):
        Dictionaries(model, [transcoder(model, 1), transcoder(model, 1)])
    with pytest.raises(ClearheadError, match="two dictionaries stand for attention of layer 0"):
        Dictionaries(model, [lorsa(model, 0), lorsa(model, 0)])
