"""Replacement: exact dictionaries cost nothing, means what they should, and each replaced layer reads the last one."""

import pytest
import torch
import torch.nn.functional as F

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.measure import measure_replacement, places_of
from clearhead.errors import ClearheadError, NonFiniteError
from tests.circuits.opened_prompts import dictionaries, lorsa, model_of, transcoder
from tests.model.tiny_configs import VOCABULARY

TOKENS = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))


def mean_loss(logits):
    return float(F.cross_entropy(logits[:, 1:-1].flatten(0, 1), TOKENS[:, 2:].flatten()))


@pytest.mark.parametrize("kind", ["all", "clt", "skip"])
def test_a_replaced_model_is_one_whose_modules_are_the_dictionaries(kind):
    model = model_of("llama")
    placed = Dictionaries(model, dictionaries(model, kind))
    found = measure_replacement(model, placed, TOKENS, batch_blocks=2)

    def edit_of(place):
        def edit(y, run):
            if place.module == "attn":
                wanted = placed.attention[place.layer](run[place.reads]).y
            elif placed.clt is None:
                wanted = placed.mlp[place.layer](run[place.reads]).y
            else:
                x = torch.stack([run[f"mlp_in.{layer}"] for layer in range(place.layer + 1)], 2)
                wanted = placed.clt(F.pad(x, (0, 0, 0, 2 - x.shape[2]))).y[:, :, place.layer]
            return torch.cat([y[:, :1], wanted[:, 1:]], 1)

        return edit

    places = places_of(placed)
    reads = [place.reads for place in places]
    run = model.run(TOKENS, read=[*reads, "logits"], edit={place.writes: edit_of(place) for place in places})
    assert found.ce_replaced == pytest.approx(mean_loss(run["logits"]), rel=1e-5)
    clean = model.run(TOKENS)["logits"]
    assert found.ce_clean == pytest.approx(mean_loss(clean), rel=1e-5)
    log_p, log_q = (logits[:, 1:-1].log_softmax(-1) for logits in (clean, run["logits"]))
    assert found.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-3)
    assert [point.replaced for point in found.curve] == list(range(len(places) + 1))
    assert found.curve[0].kl == found.curve[0].stream_fvu == 0 and found.curve[-1].ce == found.ce_replaced
    assert found.tokens == 3 * 7


def test_places_are_replaced_in_the_order_of_computation():
    model = model_of("llama")
    placed = Dictionaries(model, [transcoder(model, 1), lorsa(model, 1), transcoder(model, 0)])
    assert [place.name for place in places_of(placed)] == ["mlp.0", "attn.1", "mlp.1"]


def test_a_dictionary_that_writes_the_mean_recovers_nothing_and_explains_nothing():
    model = model_of("llama")
    constant = transcoder(model, 1)
    out = model.run(TOKENS, read=["mlp_out.1"])["mlp_out.1"][:, 1:].flatten(0, 1)
    with torch.no_grad():
        constant.W_dec.zero_()
        constant.b_dec.copy_(out.mean(0))
    found = measure_replacement(model, Dictionaries(model, [constant]), TOKENS)
    assert found.places[0].fvu == pytest.approx(1, rel=1e-5)
    assert found.places[0].fvu == pytest.approx(found.places[0].fvu_in_place)
    assert found.ce_replaced == pytest.approx(found.ce_mean, rel=1e-6)
    if found.ce_recovered is not None:
        assert found.ce_recovered == pytest.approx(0, abs=1e-4)


def test_the_first_place_in_place_is_as_good_as_alone_and_later_ones_read_what_it_writes():
    model = model_of("llama")
    found = measure_replacement(model, Dictionaries(model, dictionaries(model, "all")), TOKENS)
    first, *others = found.places
    assert first.place == "attn.0" and first.fvu == pytest.approx(first.fvu_in_place)
    assert all(other.fvu != pytest.approx(other.fvu_in_place) for other in others)


def test_bad_input_is_refused():
    model = model_of("llama")
    with pytest.raises(ClearheadError, match="nothing to replace"):
        measure_replacement(model, Dictionaries(model), TOKENS)
    placed = Dictionaries(model, [transcoder(model, 0)])
    with pytest.raises(ClearheadError, match="at least 3 tokens"):
        measure_replacement(model, placed, TOKENS[:, :2])
    broken = transcoder(model, 0)
    broken.b_dec.data[:] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        measure_replacement(model, Dictionaries(model, [broken]), TOKENS)
