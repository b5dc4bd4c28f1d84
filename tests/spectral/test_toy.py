"""The toy model: what training reaches in each setting, and every measure against a case whose answer is known."""

import dataclasses
import itertools

import pytest
import torch

from clearhead.config.spectral_toy import SpectralToy, ToySetting
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.ops.rotation import rotate
from clearhead.spectral import toy_metrics
from clearhead.spectral.factored import Factored
from clearhead.spectral.toy import Toy, draw, key_rotation, train
from clearhead.spectral.toy_dynamics import ORDER, train_watched
from clearhead.spectral.toy_metrics import make_probe, measure
from clearhead.spectral.toy_sweeps import anisotropy, variations
from clearhead.spectral.toy_verdict import outcome, verdict

QUICK = {"steps": 800, "batch": 128, "lr": 5e-3}


def trained(seed=0, records=10, **options):
    return train_watched(SpectralToy(**options).setting(), seed, records)


def words(run):
    return " ".join(verdict(run.setting, run.end))


@pytest.fixture(scope="module")
def single():
    return trained(records=60, **QUICK)


@pytest.fixture(scope="module")
def few():
    return trained(pairs=6, **QUICK)


# --- what training reaches ---


def test_single_pair_aligns_and_is_freed_from_superposition(single):
    m = single.end
    assert float(m.rank_query.min()) > 0.999 and float(m.rank_key.min()) > 0.999
    assert float(m.sigma[0]) == pytest.approx(1, abs=0.02) and float(m.sigma[1]) < 0.003
    assert float(m.ratio[0]) == pytest.approx(1, abs=0.01) and m.error < 0.01
    assert float(m.overlap[0]) < 0.01
    assert m.others_dim == pytest.approx(8, abs=0.3)  # two of ten dimensions are the pair's own
    assert outcome(single.setting, m) == "aligned and orthogonal"
    assert "spread over 7.9 of the 8 dimensions" in words(single)


def test_single_pair_is_sparse_in_its_own_basis_only(single):
    spread = single.end.spread
    assert spread.sparsity == pytest.approx(0.1, abs=0.005)  # 1/r: one of ten terms
    assert 0.3 < spread.rotated_sparsity < 0.5  # where products of Gaussians stand
    assert spread.n_recon <= 2 < spread.rotated_n_recon


def test_events_come_in_the_order_of_the_paper(single):
    reached = single.crossings()
    steps = [reached[event][0] for event in ORDER]
    assert steps == sorted(steps) and len(set(steps)) == 3 and single.in_order() == 1
    assert reached["logit"][0] < reached["amplitude"][0]
    assert single.moments[0].measures.spread.sparsity > 0.2


def test_twenty_pairs_take_the_modes_in_the_order_of_their_targets():
    m = trained(pairs=20).end
    assert int(((m.rank_query >= 0.98) & (m.rank_key >= 0.98)).sum()) == 20
    assert m.mode.tolist() == list(range(20))
    assert float((m.ratio - 1).abs().max()) < 0.01 and m.error < 2e-3
    assert m.together.tolist() == [1] * 20
    assert float(m.overlap.max()) < 0.02 and m.others_dim == pytest.approx(10, abs=0.3)


def test_a_small_weight_aligns_without_orthogonalisation_and_the_tool_says_so():
    run = trained(attention_weight=5.0, **QUICK)
    m = run.end
    assert float(m.aligned.min()) > 0.99
    assert float(m.overlap[0]) > 0.99 and bool(m.opposite[0]) and float(m.ratio[0]) < 0.5
    assert outcome(run.setting, m) == "aligned, not orthogonal"
    assert "Alignment is not orthogonalisation" in words(run) and "antipodal partner" in words(run)
    assert run.in_order() == 0


def test_without_a_head_features_spread_evenly_and_nothing_aligns():
    run = trained(attention_weight=0.0, steps=400, batch=128, lr=5e-3)
    m = run.end
    assert float(m.aligned.max()) < 0.9
    assert m.all_dim == pytest.approx(10, abs=0.3)
    assert outcome(run.setting, m) == "no head" and "No head was trained" in words(run)
    assert all(step is None for steps in run.crossings().values() for step in steps)


@pytest.mark.parametrize("rope", ["constant", "nearby"])
def test_alignment_survives_rotary_positions(rope):
    m = trained(rope=rope, **QUICK).end
    assert float(m.rank_query.min()) > 0.999 and float(m.rank_key.min()) > 0.999
    assert float(m.overlap[0]) < 0.02 and m.error < 0.05


def test_a_head_narrower_than_the_pairs_keeps_the_strongest():
    run = trained(pairs=6, head_width=4, **QUICK)
    m = run.end
    assert m.mode.tolist() == [0, 1, 2, 3, -1, -1]
    assert float(m.aligned[:4].min()) > 0.95 > float(m.aligned[4:].max())
    assert len(m.rank_query) == 4 and m.ratio[4:].tolist() == [0, 0]
    assert "narrower than the number of pairs (4 < 6): pairs 4 (" in words(run)


def test_a_few_pairs_each_get_a_mode(few):
    assert float(few.end.aligned.min()) > 0.98 and few.end.mode.tolist() == list(range(6))
    assert "6 of 6 pairs have a mode along both their features" in words(few)


# --- the model ---


def test_a_seed_gives_the_same_weights_again_and_another_seed_others():
    setting = SpectralToy(steps=3).setting()
    first, again, other = train(setting, 0), train(setting, 0), train(setting, 1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.W, other.W)


def test_watching_changes_nothing():
    setting = SpectralToy(steps=5).setting()
    watched = train_watched(setting, 0, records=5)
    assert torch.equal(watched.toy.W, train(setting, 0).W)
    assert [moment.step for moment in watched.moments] == [0, 1, 2, 3, 5]


def test_features_are_present_with_their_density_and_uniform():
    setting = SpectralToy(density=0.3).setting()
    f = draw(torch.Generator().manual_seed(0), setting, 2000)
    present = f > 0
    assert float(present.float().mean()) == pytest.approx(0.3, abs=0.005)
    assert float(f[present].mean()) == pytest.approx(0.5, abs=0.005)
    assert float(f[present].var()) == pytest.approx(1 / 12, abs=0.002) and float(f.max()) <= 1


@pytest.mark.parametrize("rope", ["off", "constant", "nearby"])
def test_losses_are_those_of_the_formulas(rope):
    setting = SpectralToy(pairs=2, features=7, width=6, head_width=4, keys=3, rope=rope).setting()
    generator = torch.Generator().manual_seed(0)
    toy = Toy(setting, generator)
    f = draw(generator, setting, 5)
    with torch.no_grad():
        losses = toy(f)
        reconstruction, divergence = 0.0, 0.0
        for b in range(5):
            tokens = [toy.W.mT @ f[b, t] for t in range(4)]
            for t in range(4):
                reconstruction += float((f[b, t] - (toy.W @ tokens[t] + toy.b).relu()).square().sum()) / 20
            logits, targets = [], []
            for place in range(3):
                query, key = tokens[0] @ toy.W_Q, tokens[place + 1] @ toy.W_K
                if rope != "off":  # plane i turns by (j − m) · base^(−2i/dh)
                    key = key.clone()
                    for plane in range(2):
                        angle = torch.tensor((place - 3) * 10_000.0 ** (-2 * plane / 4))
                        x, y = key[plane].clone(), key[plane + 2].clone()
                        key[plane], key[plane + 2] = (
                            x * angle.cos() - y * angle.sin(),
                            y * angle.cos() + x * angle.sin(),
                        )
                logits.append(float(query @ key))
                fall = (place + 1) / 3 if rope == "nearby" else 1
                targets.append(float(f[b, 0, 0] * f[b, place + 1, 2] + 0.3 * f[b, 0, 1] * f[b, place + 1, 3]) * fall)
            p, q = torch.tensor(targets).softmax(0), torch.tensor(logits).softmax(0)
            divergence += float((p * (p / q).log()).sum()) / 5
    assert float(losses.reconstruction) == pytest.approx(reconstruction, rel=1e-5)
    assert float(losses.attention) == pytest.approx(divergence, rel=1e-3)


def test_relative_rotation_of_keys_equals_rotating_both_sides():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(6, generator=generator), torch.randn(1, 5, 6, generator=generator)
    turn = key_rotation(5, 6)
    absolute = turn._replace(cos=turn.cos.flip(0), sin=-turn.sin.flip(0))  # positions 1 … 5
    at_five = rotate(q[None], turn._replace(cos=absolute.cos[-1:], sin=absolute.sin[-1:]))
    before = torch.cat([k.new_zeros(1, 1, 6), k[:, 1:]], 1)  # key 0 sits at position 0, unrotated
    rotated = rotate(before, turn._replace(cos=absolute.cos.roll(1, 0), sin=absolute.sin.roll(1, 0)))
    both = (rotated @ at_five[0])[0, 1:]
    torch.testing.assert_close(both, (rotate(k, turn) @ q)[0, 1:])


def test_training_that_diverges_says_so():
    with pytest.raises(NonFiniteError, match="smaller --lr"):
        train(SpectralToy(steps=40, lr=1e30).setting(), 0)


# --- the measures ---


def planted(sigma=(1.0, 0.7), noise=0.0):
    """A toy whose pairs (0, 2), (1, 3) are axes of an 8-dimensional space, and its setting."""
    setting = SpectralToy(pairs=2, features=9, width=8, head_width=8, weakest_target=0.7).setting()
    toy = Toy(setting, torch.Generator().manual_seed(0))
    with torch.no_grad():
        toy.W.zero_()
        toy.W[:8] = torch.eye(8)
        toy.W[8, 4] = -1.0
        omega = torch.zeros(8, 8)
        omega[0, 2], omega[1, 3] = sigma
        toy.W_Q.copy_(omega + noise * torch.eye(8))
        toy.W_K.copy_(torch.eye(8))
    return toy, setting


def test_measures_of_a_planted_head():
    toy, setting = planted()
    m = measure(toy, make_probe(setting))
    assert m.query.tolist() == pytest.approx([1, 1]) and m.key.tolist() == pytest.approx([1, 1])
    assert m.ratio.tolist() == pytest.approx([1, 1]) and m.error == pytest.approx(0, abs=1e-6)
    assert m.overlap.tolist() == [0, 0] and m.overlap_rms == 0
    assert m.live == 8 and m.together.tolist() == [1, 1] and m.contained.tolist() == pytest.approx([1, 1])
    # each firing is one term of eight; a second pair in the same sequence makes it two at most
    assert 1 / 8 <= m.spread.sparsity < 2 / 8 and m.spread.n_recon == 1


def test_pairs_are_matched_where_the_ranks_are_exchanged():
    toy, setting = planted(sigma=(0.5, 1.0))
    m = measure(toy, make_probe(setting))
    assert m.mode.tolist() == [1, 0]
    assert m.aligned.tolist() == pytest.approx([1, 1]) and m.rank_query.tolist() == pytest.approx([0, 0], abs=1e-9)
    assert m.ratio.tolist() == pytest.approx([0.5, 1 / 0.7])
    assert m.error == pytest.approx(0.5, abs=1e-6)


def test_close_modes_are_flagged_and_their_span_is_what_counts():
    toy, setting = planted(sigma=(1.0, 0.999), noise=0.001)
    with torch.no_grad():  # turn the two modes into each other by 45 degrees
        turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]]) / 2**0.5
        toy.W_Q[:2, 2:4] = turn @ torch.diag(torch.tensor([1.0, 0.7])) @ turn.mT
    m = measure(toy, make_probe(setting))
    assert m.together.min() > 1
    assert float(m.aligned.max()) < 0.8 and float(m.contained.min()) > 0.999
    said = " ".join(verdict(setting, dataclasses.replace(m, ratio=torch.ones(2))))
    assert "nothing keeps their single vectors apart" in said


def test_assignment_is_the_best_of_all_permutations():
    generator = torch.Generator().manual_seed(3)
    svd = Factored(torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)).svd()
    features = torch.nn.functional.normalize(torch.randn(8, 6, generator=generator), dim=1)
    mode, query, key = toy_metrics.match(svd, features[:4], features[4:])
    joint = (features[:4] @ svd.U).abs() * (features[4:] @ svd.V).abs()
    best = max(sum(float(joint[k, m]) for k, m in enumerate(p)) for p in itertools.permutations(range(5), 4))
    assert float((query * key).sum()) == pytest.approx(best, rel=1e-6)
    assert sorted(set(mode.tolist())) == sorted(mode.tolist())


def test_a_dead_direction_spoils_raw_vectors_and_the_effective_head_recovers():
    """Ω keeps its start where no token reaches; logits, contributions and the effective head do not see it."""
    toy, setting = planted()
    with torch.no_grad():
        toy.W[:, 7] = 0
    probe = make_probe(setting)
    before = measure(toy, probe)
    logits = toy.logits(probe.f @ toy.W)
    with torch.no_grad():
        # rank-one leftovers whose query side is dead, but which mix with both planted modes on the key side
        toy.W_Q[7, 2], toy.W_Q[7, 3] = 2.0, 1.5
    after = measure(toy, probe)
    assert after.live == 7
    torch.testing.assert_close(toy.logits(probe.f @ toy.W), logits)
    assert float(after.aligned.min()) < 0.8
    assert float(torch.minimum(after.effective_query, after.effective_key).min()) == pytest.approx(1, abs=1e-6)
    assert after.error == pytest.approx(before.error, abs=1e-6)
    assert "in the others Ω keeps its start" in " ".join(verdict(setting, after))


def test_groups_of_close_values():
    S = torch.tensor([1.0, 0.9, 0.89, 0.5, 0.1, 0.09])
    assert toy_metrics.groups(S, 0.05).tolist() == [0, 1, 1, 2, 3, 3]
    assert toy_metrics.groups(S, 2.0).tolist() == [0] * 6


def test_effective_dimension():
    assert toy_metrics.effective_dim(torch.eye(5)) == pytest.approx(5)
    assert toy_metrics.effective_dim(torch.ones(4, 5)) == pytest.approx(1)
    assert toy_metrics.effective_dim(torch.zeros(0, 5)) == 0


def test_contributions_sum_to_the_relative_logit_with_and_without_rotation(single):
    setting = SpectralToy(pairs=2, features=9, width=6, head_width=4, rope="nearby").setting()
    for toy, probe in (
        (single.toy, make_probe(single.setting)),
        (Toy(setting, torch.Generator().manual_seed(0)), make_probe(setting)),
    ):
        with torch.no_grad():
            logits = toy.logits(probe.f @ toy.W).double()
            mine = logits[torch.arange(len(logits)), probe.key]
            m = logits.shape[1]
            relative = mine - (logits.sum(1) - mine) / (m - 1)
            terms = toy_metrics.contributions_of(toy, toy.omega().svd(), probe)
        torch.testing.assert_close(terms.sum(1), relative, rtol=1e-3, atol=1e-5)


# --- settings and sweeps ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"features": 2}, "--features 2 is not possible: the 2 of the pairs need one more"),
        ({"width": 10, "head_width": 12}, "--head-width 12 is not possible: a token has 10 dimensions"),
        ({"rope": "constant", "head_width": 5}, "give an even number"),
        ({"keys": 1}, "--keys 1 is not possible"),
        ({"density": 1.5}, "a probability is at most 1"),
        ({"weakest_target": 0.0}, "--weakest-target 0.0"),
        ({"attention_weight": -1.0}, "--attention-weight -1.0"),
        ({"pairs": 0}, "--pairs 0"),
        ({"lr": float("nan")}, "--lr nan"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ClearheadError, match=says):
        SpectralToy(**options)


def test_derived_sizes():
    one, many = SpectralToy().setting(), SpectralToy(pairs=20).setting()
    assert (one.features, one.width, one.head_width, one.steps) == (20, 10, 10, 1500)
    assert (many.features, many.width, many.head_width, many.attention_weight) == (100, 50, 50, 1000)
    assert SpectralToy(features=23, rope="constant").setting().head_width == 10
    resolved = SpectralToy(pairs=20).resolved()
    assert resolved.setting() == many and str(resolved.out) == "runs/toy-20"


@pytest.mark.parametrize(
    ("sweep", "field", "values"),
    [
        ("attention-weight", "attention_weight", [0, 1, 3, 10, 30, 100, 1000]),
        ("features", "features", [20, 30, 40, 60]),
        ("keys", "keys", [2, 4, 8, 16, 32]),
        ("head-width", "head_width", [1, 2, 4, 10]),
    ],
)
def test_sweeps_vary_one_setting(sweep, field, values):
    setting = SpectralToy().setting()
    varied = variations(setting, sweep)
    assert [getattr(toy, field) for toy in varied] == values
    assert all(dataclasses.replace(toy, **{field: getattr(setting, field)}) == setting for toy in varied)


def test_sweeps_of_rotary_heads_stay_even_and_include_fewer_modes_than_pairs():
    widths = [s.head_width for s in variations(SpectralToy(pairs=20, rope="constant").setting(), "head-width")]
    assert widths == [10, 20, 40, 50]
    assert variations(SpectralToy().setting(), "none") == []
    with pytest.raises(UnknownNameError, match="head-width"):
        variations(SpectralToy().setting(), "head width")  # pyright: ignore[reportArgumentType]


def test_anisotropy_takes_raw_vectors_away_and_unwhitening_brings_them_back():
    rows = anisotropy(counts=(100,))
    raw, floor = [row.raw for row in rows], [row.floor for row in rows]
    assert raw == sorted(raw, reverse=True) and raw[0] == pytest.approx(0.71, abs=0.02) and raw[-1] < 0.35
    assert all(row.recovered > 0.99 for row in rows)
    assert all(low < value for low, value in zip(floor, raw, strict=True))
    assert [row.interference for row in rows] == sorted(row.interference for row in rows)
    assert max(row.centred for row in rows) - min(row.centred for row in rows) < 0.02


def test_setting_is_complete():
    assert {field.name for field in dataclasses.fields(ToySetting)} <= {
        field.name for field in dataclasses.fields(SpectralToy)
    }
