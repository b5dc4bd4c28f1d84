"""Inclusion curves of levels whose circuits are known, and of a planted circuit."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from clearhead.circuits.curves.curve import Curve, drop_weak, score, trace_curve
from clearhead.circuits.curves.node_level import NodeLevel
from clearhead.circuits.patching.metrics import METRICS
from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from tests.circuits.planted import CIRCUIT, planted_model, planted_rows


@dataclass
class Additive:
    """A level whose metric is the sum of its kept components' weights, times a prompt's own strength."""

    weights: Tensor
    per_prompt: bool = False
    strength: Sequence[float] = (1.0, 1.0)
    name: str = "heads"
    notes: Sequence[str] = ()
    evaluated: list[int] = field(default_factory=list)

    def count(self, _rows: TaskBatch) -> int:
        return len(self.weights)

    def names(self, rows: TaskBatch) -> list[str]:
        return [f"head.0.{i}" for i in range(self.count(rows))]

    def scores(self, _method: str, batches: Sequence[TaskBatch]) -> list[Tensor]:
        """Every other prompt ranks the components backwards where prompts have their own."""
        own = torch.stack([self.weights, self.weights.flip(0) if self.per_prompt else self.weights])
        return [own[[item % 2 for item in rows.items]] for rows in batches]

    def evaluate(self, keep: Tensor, rows: TaskBatch) -> Tensor:
        keep = keep.expand(-1, len(rows.items), -1)
        self.evaluated += keep.sum(-1).flatten().tolist()
        own = torch.stack([self.weights, self.weights.flip(0) if self.per_prompt else self.weights])
        weights = own[[item % 2 for item in rows.items]]
        strength = torch.tensor([self.strength[item % 2] for item in rows.items], dtype=torch.float64)
        value = (keep * weights).sum(-1) * strength
        return torch.stack([value] * len(METRICS), dim=-1)


def rows(n: int = 4) -> TaskBatch:
    return planted_rows(n)


TEMPLATES = {item: "even" if item % 2 == 0 else "odd" for item in range(20)}


def curve_of(level: Additive | NodeLevel, policy: str = "signed", n: int = 4, method: str = "exact") -> Curve:
    batches = [rows(n)]
    scores = score(level, method, batches, batches)  # pyright: ignore[reportArgumentType]
    return trace_curve(level, scores, policy, batches, TEMPLATES)  # pyright: ignore[reportArgumentType]


def test_crossings_are_exact_and_signs_matter():
    # 40 helpful components of weight 1, 60 harmful ones of −½, 300 idle: F of all is 10/10
    weights = torch.cat([torch.ones(40), -0.5 * torch.ones(60), torch.zeros(300)]).double()
    signed, absolute = curve_of(Additive(weights)), curve_of(Additive(weights), "absolute")
    assert (signed.first, signed.stable) == (9, 9)
    assert float(signed.f.max()) == 4.0
    assert (absolute.first, absolute.stable) == (9, 9)
    assert signed.f[-1] == absolute.f[-1] == 1
    assert signed.complement == pytest.approx(0.1)
    assert signed.circuit == tuple(f"head.0.{i}" for i in range(9))
    assert signed.tied == 40


def test_a_curve_that_falls_back_has_a_later_stable_crossing():
    # by |weight|: +5, −3 at once, then +1 each: F = 1, .4, .6, .8, 1
    weights = torch.tensor([5.0, -3, 1, 1, 1] + [0.0] * 200, dtype=torch.float64)
    curve = curve_of(Additive(weights), "absolute")
    assert (curve.first, curve.stable) == (1, 5)


def test_every_count_between_the_last_below_and_the_first_above_is_evaluated():
    weights = torch.ones(500, dtype=torch.float64)
    level = Additive(weights)
    curve = curve_of(level)
    assert curve.stable == curve.first == 450
    below = max(count for count, f in zip(curve.counts, curve.f.tolist(), strict=True) if f < 0.9)
    assert below == 449
    assert len(level.evaluated) < 4 * 500


def test_wide_gaps_are_cut_until_the_crossing_is_exact():
    level = Additive(torch.ones(30_000, dtype=torch.float64))
    curve = curve_of(level, n=1)
    assert curve.first == 27_000
    assert len(curve.counts) < 300


def test_prompts_with_rankings_of_their_own():
    weights = torch.tensor([4.0, 3, 2, 1, 0, 0], dtype=torch.float64)
    curve = curve_of(Additive(weights, per_prompt=True))
    assert curve.f.tolist()[:5] == pytest.approx([0, 0.4, 0.7, 0.9, 1])
    assert curve.stable == 3
    assert curve.circuit == ()


def test_areas_and_per_prompt_crossings_of_a_straight_curve():
    curve = curve_of(Additive(torch.ones(20, dtype=torch.float64), strength=(1.0, -0.25)))
    assert curve.auc == pytest.approx(0.5)
    assert curve.per_prompt() == [18, None, 18, None]
    numbers = curve.to_dict()
    assert numbers["counts"][0] == 0
    assert numbers["counts"][-1] == 20
    # shares up to 0.02 of 20 components keep none; then 1, 2, 4, 10, 20 of them
    f, p = [0, 0.05, 0.1, 0.2, 0.5, 1], [0.02, 0.05, 0.1, 0.2, 0.5, 1]
    expected = sum((p[i + 1] - p[i]) * (f[i] + f[i + 1]) / 2 for i in range(5))
    assert numbers["cpr"] == pytest.approx(expected)
    assert numbers["cmd"] == pytest.approx(0.999 - expected)


def test_intervals_draw_prompts_or_templates():
    weights = torch.tensor([4.0, 3, 2, 1, 0, 0], dtype=torch.float64)
    strong_and_weak = Additive(weights, per_prompt=True, strength=(5.0, 1.0))
    curve = curve_of(strong_and_weak, n=8)
    by_prompt, by_template = (curve.intervals(by_template=flag) for flag in (False, True))
    assert by_prompt["stable"] == by_template["stable"] == (3.0, 3.0)  # ranked one by one, all prompts agree
    shared = curve_of(Additive(weights), n=1)
    assert shared.intervals(by_template=False)["auc"] is None


def test_weak_prompts_are_dropped_and_counted():
    level = Additive(torch.ones(10, dtype=torch.float64), strength=(1.0, 0.01))
    kept, dropped = drop_weak(level, [rows(4)])  # pyright: ignore[reportArgumentType]
    assert [batch.items for batch in kept] == [[0, 2]]
    assert dropped == [1, 3]
    kept, dropped = drop_weak(level, [rows(4)], min_effect=100)  # pyright: ignore[reportArgumentType]
    assert kept == []
    with pytest.raises(ClearheadError, match="no prompts are left"):
        trace_curve(level, score(level, "exact", [rows()], []), "signed", [], TEMPLATES)  # pyright: ignore


def test_a_model_without_the_behaviour_and_bad_names_are_refused():
    level = Additive(-torch.ones(10, dtype=torch.float64))
    with pytest.raises(ClearheadError, match="use a task that this model does"):
        curve_of(level)
    batches = [rows()]
    scores = score(level, "random", batches, batches)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownNameError, match="did you mean 'accuracy'"):
        trace_curve(level, scores, "signed", batches, TEMPLATES, metric="acuracy")  # pyright: ignore
    with pytest.raises(NonFiniteError, match="score of head.0.3 by exact"):
        score(Additive(torch.tensor([1, 1, 1, float("nan")])), "exact", batches, batches)  # pyright: ignore


def test_random_rankings_follow_their_seed_and_do_not_score():
    level, batches = Additive(torch.ones(50, dtype=torch.float64)), [rows(), rows()]
    one, same, other = (score(level, "random", batches, batches, seed=seed) for seed in (1, 1, 2))  # pyright: ignore
    assert torch.equal(one.of_batches[0], same.of_batches[1])
    assert not torch.equal(one.of_batches[0], other.of_batches[0])


@pytest.mark.parametrize("kind", ["heads", "heads+mlps"])
def test_the_planted_circuit_is_found_on_other_prompts(kind: str):
    level = NodeLevel.open(planted_model(), kind, "corrupt")  # pyright: ignore[reportArgumentType]
    ranked, evaluated = [planted_rows(4)], [planted_rows(4, first=4)]
    for method in ("exact", "atp", "ig", "relevance"):
        scores = score(level, method, ranked, evaluated)
        for policy in ("signed", "absolute"):
            curve = trace_curve(level, scores, policy, evaluated, TEMPLATES)  # pyright: ignore[reportArgumentType]
            assert (curve.first, curve.stable) == (2, 2), method
            assert set(curve.circuit) == set(CIRCUIT), method
            assert curve.complement == pytest.approx(0, abs=0.05)
            assert curve.items == (4, 5, 6, 7)
