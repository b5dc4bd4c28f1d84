"""The values of every ablation, against the activations they are made of."""

import pytest
import torch

from clearhead.circuits.curves.masks import learn_masks
from clearhead.circuits.curves.node_level import NodeLevel
from clearhead.circuits.patching.ablation import Replacement
from clearhead.circuits.patching.metrics import METRICS
from clearhead.errors import ClearheadError, UnknownNameError
from tests.circuits.patching.test_nodes import random_rows, tiny
from tests.circuits.planted import CIRCUIT, planted_model, planted_rows

SITES = ["z.0", "mlp_out.1", "k.1"]


def test_corrupt_and_resample_are_other_prompts():
    model, rows = planted_model(), planted_rows(4)
    corrupt = model.run(rows.corrupt, read=SITES)
    found = Replacement(model, SITES, "corrupt").values(rows)
    assert all(torch.equal(found[site], corrupt[site]) for site in SITES)
    pool = planted_rows(5)
    others = model.run(pool.corrupt, read=SITES)
    drawn = Replacement(model, SITES, "resample", reference=[pool], seed=3).values(rows)["z.0"]
    for row in range(4):
        matches = [item for item in range(5) if torch.allclose(drawn[row], others["z.0"][item])]
        assert len(matches) == 1
        assert matches != [row]
    alone = planted_rows(1)
    with pytest.raises(ClearheadError, match="item 0 is the only one of its length"):
        Replacement(model, SITES, "resample", reference=[alone]).values(alone)


def test_means_run_over_prompts_and_positions_or_prompts_alone():
    model, long, short = planted_model(), planted_rows(3), planted_rows(2, length=4)
    runs = [model.run(rows.clean, read=SITES) for rows in (long, short)]
    mean = Replacement(model, SITES, "mean", reference=[long, short]).values(short)
    z = torch.cat([run["z.0"].flatten(0, 1) for run in runs]).mean(0)
    k = torch.cat([run["k.1"].transpose(1, 2).flatten(0, 1) for run in runs]).mean(0)
    torch.testing.assert_close(mean["z.0"], z[None, None])
    torch.testing.assert_close(mean["k.1"], k[None, :, None])
    positional = Replacement(model, SITES, "positional_mean", reference=[long, short])
    torch.testing.assert_close(positional.values(short)["z.0"], runs[1]["z.0"].mean(0, keepdim=True))
    with pytest.raises(ClearheadError, match=r"reference prompts of 5 tokens; the reference has lengths \[4, 6\]"):
        positional.values(planted_rows(2, length=5))


def test_zero_is_zero_and_bad_choices_are_refused():
    model = planted_model()
    assert float(Replacement(model, SITES, "zero").values(planted_rows())["z.0"]) == 0
    with pytest.raises(UnknownNameError, match="did you mean 'mean'"):
        Replacement(model, SITES, "meen")  # pyright: ignore[reportArgumentType]
    for ablation in ("mean", "resample", "positional_mean"):
        with pytest.raises(ClearheadError, match="give prompts of the task"):
            Replacement(model, SITES, ablation)
    with pytest.raises(ClearheadError, match="takes learned constants"):
        Replacement(model, SITES, "optimal", reference=[planted_rows()])


def test_optimal_constants_harm_the_model_less_than_means():
    model, rows = tiny("gpt2"), random_rows()
    keep = torch.rand(40, 3, 10, generator=torch.Generator().manual_seed(1)) < torch.linspace(0, 1, 40)[:, None, None]
    harm = {}
    for ablation in ("mean", "optimal"):
        level = NodeLevel.open(model, "heads+mlps", ablation, reference=[rows], seed=5)
        harm[ablation] = -level.evaluate(keep, rows)[..., METRICS.index("kl")].mean()
    assert harm["optimal"] < 0.7 * harm["mean"]


def test_a_learned_mask_keeps_the_planted_heads_and_its_budget():
    level = NodeLevel.open(planted_model(), "heads", "corrupt")
    kept = learn_masks(level.nodes, [planted_rows(4)], budget=2, steps=80, quiet=True)
    names = level.names(planted_rows())
    assert {names[i] for i in kept.topk(2).indices.tolist()} == set(CIRCUIT)
    assert float(kept.sum()) == pytest.approx(2, abs=0.7)
    with pytest.raises(ClearheadError, match="budget: expected 1 to 8 components, got 9"):
        learn_masks(level.nodes, [planted_rows(4)], budget=9, quiet=True)


def test_what_belongs_to_pairs_of_positions_has_no_mean_over_them_and_scores_no_zero():
    model, rows = planted_model(), planted_rows(3)
    with pytest.raises(ClearheadError, match=r"pattern\.0 belongs to pairs of positions"):
        Replacement(model, ["z.0", "pattern.0"], "mean", reference=[rows])
    with pytest.raises(ClearheadError, match="would open keys that the mask hides"):
        Replacement(model, ["scores.1"], "zero")
    assert not Replacement(model, ["pattern.0"], "zero").values(rows)["pattern.0"].any()
