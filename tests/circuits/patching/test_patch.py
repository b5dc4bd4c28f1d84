"""Activation patches against plain forwards with one edit, for every kind of place."""

import pytest
import torch
from torch import Tensor

from clearhead.circuits.patching.metrics import METRICS
from clearhead.circuits.patching.patch import Place, exchange, patch
from clearhead.data.tasks import logit_difference
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model import Model
from clearhead.model.gates import install
from clearhead.units.unit import Unit
from tests.circuits.patching.test_nodes import random_rows, tiny
from tests.circuits.planted import planted_model, planted_rows
from tests.model.tiny_configs import build

LABELS = {"end": torch.tensor([8, 8, 8]), "S2": torch.tensor([2, 5, 7])}


def by_hand(model: Model, rows, sites: list[str], where: tuple, path: str | None = None) -> Tensor:
    """Logit differences with x[where] of every site taken from the corrupt run, each prompt's own `where` alike."""
    other = model.run(rows.corrupt, read=sites, path=path)  # pyright: ignore[reportArgumentType]

    def cut(x: Tensor, run) -> Tensor:
        x = x.clone()
        x[where] = other[str(run.site)][where]
        return x

    run = model.run(rows.clean, edit=dict.fromkeys(sites, cut), path=path)  # pyright: ignore[reportArgumentType]
    return logit_difference(run.logits[:, -1], rows)


def test_every_kind_of_place_is_one_edit():
    model, rows = tiny("llama"), random_rows()._replace(labels=LABELS)
    every, rows_of = slice(None), torch.arange(3)
    expected = {
        "resid_pre.0@3": (["resid_pre.0"], (every, 3)),
        "resid_pre.1@S2": (["resid_pre.1"], (rows_of, LABELS["S2"])),
        "resid_mid.1": (["resid_mid.1"], (every,)),
        "resid_post.0": (["resid_post.0"], (every,)),
        "z.0.2@4": (["z.0"], (every, 4, 2)),
        "head.1.3": (["z.1"], (every, every, 3)),
        "head.1.3@end": (["z.1"], (every, 8, 3)),
        "k.0.1@2": (["k.0"], (every, 1, 2)),
        "kvhead.0.1": (["k.0", "v.0"], (every, 1)),
        "head_q.1.0@8": (["q.1"], (every, 0, 8)),
        "mlp.0": (["mlp_out.0"], (every,)),
        "attn.1@7": (["attn_out.1"], (every, 7)),
        "mlp_in.1": (["mlp_in.1"], (every,)),
        "v.-1.0": (["v.1"], (every, 0)),
    }
    found = patch(model, rows, list(expected))
    for place, row in zip(found.places, found.patched[..., METRICS.index("logit_difference")], strict=True):
        torch.testing.assert_close(row, by_hand(model, rows, *expected[place]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found.effects, found.patched[..., 0] - logit_difference(model.run(rows.clean).logits[:, -1], rows)
    )


def test_patterns_are_patched_on_one_path_with_all_others():
    model, rows = Model(build("llama", attn="sdpa")), random_rows()
    install(model, bias=0.5)
    found = patch(model, rows, ["pattern.1.2@8", "z.0.1", "scores.0.0"])
    every = slice(None)
    for place, site, where in (
        (0, "pattern.1", (every, 2, 8)),
        (1, "z.0", (every, every, 1)),
        (2, "scores.0", (every, 0)),
    ):
        expected = by_hand(model, rows, [site], where, path="eager").double()
        torch.testing.assert_close(found.patched[place, :, 0], expected, rtol=1e-4, atol=1e-4)


def test_units_other_values_and_denoising():
    model, rows = planted_model(), planted_rows()
    found = patch(model, rows, [Unit("head", 0, 1, position=5), Unit("head", 0, 1, position=2), "head.1.2@5"])
    assert float(found.effects[0].max()) < -15  # the copy at the last token is all that is read
    assert float(found.effects[1].abs().max()) < 1
    back = patch(model, exchange(rows), ["head.0.1", "head.0.2"])
    assert bool((back.patched[0, :, METRICS.index("accuracy")] == 1).all())
    assert bool((back.patched[1, :, METRICS.index("accuracy")] == 0).all())
    zero, mean = (patch(model, rows, ["head.1.2"], value, reference=[rows]) for value in ("zero", "mean"))
    assert not torch.allclose(zero.effects, mean.effects)
    assert float(zero.effects.max()) < -5


def test_places_that_do_not_exist_are_named():
    model, rows = tiny("llama"), random_rows()
    with pytest.raises(UnknownNameError, match="did you mean 'resid_pre'"):
        Place.parse("resid_pr.0", model)
    with pytest.raises(ClearheadError, match="layers 0 to 1"):
        Place.parse("z.2", model)
    with pytest.raises(ClearheadError, match="names no place; a place looks like"):
        Place.parse("everything", model)
    with pytest.raises(ClearheadError, match="site resid_pre has no heads"):
        Place.parse("resid_pre.0.1", model)
    with pytest.raises(ClearheadError, match="named by layer and index"):
        Place.parse("head.0", model)
    for place, message in (
        ("k.0.2", "there are 2 heads of k.0"),
        ("head.0.4", "there are 4 heads of z.0"),
        ("resid_pre.0@9", "there are 9 tokens"),
        ("resid_pre.0@S2", "unknown label in place 'resid_pre.0@S2' 'S2'"),
    ):
        with pytest.raises(ClearheadError, match=message):
            patch(model, rows, [place])
    with pytest.raises(ClearheadError, match="expected at least one"):
        patch(model, rows, [])
    with pytest.raises(ClearheadError, match="equal length"):
        patch(model, rows._replace(corrupt=rows.corrupt[:, :-1]), ["z.0"])
