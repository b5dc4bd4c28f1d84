import math

import pytest
import torch

from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.sparsify.geco import Geco, GecoSettings

RATES = {"normalised": 0.02, "exponential": 1.0, "additive": 5.0, "speedup": 0.2}
CURVATURE, TARGET = 0.7, 0.02
CENTRE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def descend(geco, steps, rate=0.1, start=None):
    """Gradient descent on ½ a |θ|² subject to ½ |θ − c|² ≤ τ; the multipliers on the way, and θ."""
    theta = (CENTRE if start is None else start).clone().requires_grad_()
    trace = []
    for step in range(steps):
        constrained = 0.5 * (theta - CENTRE).square().sum()
        loss = geco.weigh(0.5 * CURVATURE * theta.square().sum(), constrained)
        (gradient,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            theta -= rate * gradient
        geco.update(float(constrained.detach()), step)
        trace.append(geco.multiplier)
    return trace, theta.detach()


def optimum(target=TARGET):
    """On the line from 0 to c at distance √(2τ) from c, where a θ = λ (c − θ)."""
    left = math.sqrt(2 * target) / float(CENTRE.norm())
    return CURVATURE * (1 - left) / left, (1 - left) * CENTRE


@pytest.mark.parametrize("rule", RATES)
def test_reaches_the_analytic_multiplier_and_optimum(rule):
    geco = Geco(GecoSettings(rule, rate=RATES[rule], average=0.9), TARGET, slack=TARGET)
    trace, theta = descend(geco, 1500)
    multiplier, best = optimum()
    assert trace[-1] == pytest.approx(multiplier, rel=1e-4)
    torch.testing.assert_close(theta, best, rtol=1e-5, atol=0)


def test_the_multiplier_is_the_price_of_the_tolerance():
    def edges(target):
        return 0.5 * CURVATURE * float(optimum(target)[1].square().sum())

    slope = (edges(TARGET + 1e-6) - edges(TARGET - 1e-6)) / 2e-6
    assert optimum()[0] == pytest.approx(-slope, rel=1e-6)


def test_plain_exponential_winds_up_and_normalised_does_not():
    """Nats of violation for some hundred steps, then a slack of hundredths."""
    values = [TARGET + 3.0] * 300 + [0.0] * 1500

    def steps_back(rule, rate):
        geco = Geco(GecoSettings(rule, rate=rate, average=0.9, high=1e6), TARGET, slack=TARGET)
        trace = []
        for step, value in enumerate(values):
            geco.update(value, step)
            trace.append(geco.multiplier)
        return sum(multiplier > 1.0 for multiplier in trace[300:])

    assert steps_back("exponential", 0.02) == 1500  # never
    assert steps_back("normalised", 0.02) == pytest.approx(300, abs=100)  # as long as it took to get there
    assert steps_back("speedup", 0.02) == 1500


def test_a_start_far_from_the_constraint_costs_the_plain_rule_its_run():
    """Some nats too many at the start, as after closing gates at once; the rates are equal near the target."""

    def settled(rule):
        geco = Geco(GecoSettings(rule, rate=RATES[rule], average=0.9), TARGET, slack=TARGET)
        trace, _ = descend(geco, 1500, start=CENTRE + 2.0)
        wrong = [step for step, multiplier in enumerate(trace) if abs(multiplier / optimum()[0] - 1) > 0.1]
        return max(trace), wrong[-1] + 1

    largest, step = settled("exponential")
    assert largest == pytest.approx(1e3) and step > 300
    largest, step = settled("normalised")
    assert largest < 2 * optimum()[0] and step < 200


def test_normalised_rule_counts_in_units_of_the_slack_and_clips():
    settings = GecoSettings(rate=0.5, average=0.0)

    def moved(value):
        geco = Geco(settings, target=1.0, slack=0.04)
        geco.update(value, 0)
        return math.log(geco.multiplier)

    assert moved(1.01) == pytest.approx(0.5 * 0.25)
    assert moved(1.04) == pytest.approx(0.5)
    assert moved(9.0) == pytest.approx(0.5)
    assert moved(0.99) == pytest.approx(-0.5 * 0.25)
    assert moved(-5.0) == pytest.approx(-0.5)


def test_average_is_the_weighted_mean_of_the_values_so_far():
    geco = Geco(GecoSettings(average=0.9), target=1.0, slack=1.0)
    assert geco.average == 1.0
    values = [4.0, 2.0, 7.0]
    for step, value in enumerate(values):
        geco.update(value, step)
    weights = [0.81, 0.9, 1.0]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert geco.average == pytest.approx(expected)


@pytest.mark.parametrize("rule", RATES)
def test_clamps(rule):
    settings = GecoSettings(rule, rate=1.0, average=0.0, low=0.5, high=2.0)
    geco = Geco(settings, target=1.0, slack=1.0)
    for step in range(5):
        geco.update(1e4, step)
    assert geco.multiplier == 2.0
    for step in range(5):
        geco.update(-1e4, step)
    assert geco.multiplier == 0.5
    geco.update(1.5, 6)
    assert geco.multiplier > 0.5


def test_frozen_steps_move_the_average_only():
    geco = Geco(GecoSettings(freeze=3, initial=2.0), target=1.0, slack=0.1)
    for step in range(3):
        geco.update(5.0, step)
    assert geco.multiplier == pytest.approx(2.0, rel=1e-12)
    assert geco.average == pytest.approx(5.0)
    geco.update(5.0, 3)
    assert geco.multiplier == pytest.approx(2.0 * math.exp(0.02))


def test_weigh_is_the_lagrangian_over_its_weights():
    geco = Geco(GecoSettings(initial=3.0), target=2.0, slack=1.0)
    edges = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    value = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    weighed = geco.weigh(edges, value)
    assert float(weighed.detach()) == pytest.approx((0.5 + 3 * 0.5) / 4)
    weighed.backward()
    assert edges.grad is not None and value.grad is not None
    assert (float(edges.grad), float(value.grad)) == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize("rule", RATES)
def test_state_round_trip_is_bitwise(rule):
    settings = GecoSettings(rule, average=0.97)
    values = torch.linspace(1.1, 0.9, 40).sin().tolist()
    whole, first = Geco(settings, 1.0, 0.05), Geco(settings, 1.0, 0.05)
    for step, value in enumerate(values):
        whole.update(value, step)
        if step < 20:
            first.update(value, step)
    second = Geco(settings, 1.0, 0.05)
    state = first.state()
    assert all(tensor.dtype == torch.float64 for tensor in state.values())
    second.load_state(state | {"other": torch.zeros(())})
    for step in range(20, 40):
        second.update(values[step], step)
    assert (second.multiplier, second.average) == (whole.multiplier, whole.average)
    assert torch.equal(second.state()["geco"], whole.state()["geco"])


def test_unreachable_is_said_after_the_freeze_and_only_while_it_lasts():
    geco = Geco(GecoSettings(rate=1.0, average=0.0, high=10.0, freeze=50), target=1.0, slack=0.1)
    for step in range(50):
        geco.update(2.0, step)
    assert geco.unreachable(5) is None
    for step in range(50, 57):
        geco.update(2.0, step)
    assert geco.unreachable(6) is None  # the bound was reached at the third of these
    geco.update(2.0, 57)
    message = geco.unreachable(6)
    assert message is not None
    assert "10" in message and "2.0000" in message and "1.0000" in message and "--tolerance" in message
    again = Geco(geco.settings, 1.0, 0.1)
    again.load_state(geco.state())
    assert again.unreachable(6) == message
    geco.update(0.5, 58)
    assert geco.unreachable(1) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_are_refused_and_change_nothing(value):
    geco = Geco(GecoSettings(), 1.0, 0.1)
    geco.update(1.2, 0)
    before = geco.state()["geco"]
    with pytest.raises(NonFiniteError, match="step 7"):
        geco.update(value, 7)
    assert torch.equal(geco.state()["geco"], before)
    with pytest.raises(NonFiniteError):
        Geco(GecoSettings(), value, 0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"rate": math.nan},
        {"average": 1.0},
        {"average": -0.1},
        {"low": 0.0},
        {"low": 2.0, "high": 1.0},
        {"high": math.inf},
        {"initial": 1e4},
        {"freeze": -1},
    ],
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ClearheadError, match="expected"):
        GecoSettings(**wrong)


def test_bad_rule_and_slack_are_refused():
    with pytest.raises(UnknownNameError, match="normalised"):
        GecoSettings(rule="normalized")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ClearheadError, match="slack"):
        Geco(GecoSettings(), 1.0, 0.0)
    Geco(GecoSettings("additive"), 1.0, 0.0)
