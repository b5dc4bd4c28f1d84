"""Complete replacement: the model run with dictionaries in the place of attention and MLPs, their errors left out.

    CE recovered = (CE_mean − CE_replaced) / (CE_mean − CE_clean)        KL(clean ‖ replaced), nats per token

Mean is the same places written with their mean output over the measured tokens, which knows no context; zeros in all
layers of a model leave a far higher loss, and nearly everything recovers that. Places are replaced in the order in
which the model computes them, one more at a time: the accumulation curve is CE, KL and the part of the last stream's
variance that is lost, after each. Every dictionary reads what the replaced model gives it, so errors compound. For each
place, with all replaced,

    fvu           Σ‖ŷ(x) − y‖² / Σ‖y − ȳ‖²       on the clean model's inputs x and outputs y
    fvu_in_place  the same for ŷ(x̂), x̂ the inputs of the replaced model

As everywhere, position 0 of a block stays the model's own and is not counted, and losses begin with the prediction of
position 2. The graph's replacement score, which keeps errors as sources, is in tracing/influence.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.model.run import Edit, Run, keep_first
from clearhead.runs import progress


@dataclass(frozen=True)
class Place:
    """One module that is replaced."""

    module: str
    """`attn` or `mlp`."""
    layer: int

    @property
    def name(self) -> str:
        """`attn.3`."""
        return f"{self.module}.{self.layer}"

    @property
    def reads(self) -> str:
        """Site of its input."""
        return f"{self.module}_in.{self.layer}"

    @property
    def writes(self) -> str:
        """Site of its output."""
        return f"{self.module}_out.{self.layer}"


@dataclass(frozen=True)
class Point:
    """The model with the first `replaced` places replaced."""

    replaced: int
    last: str
    """The place that came last; empty for the clean model."""
    ce: float
    kl: float
    stream_fvu: float
    """Share of the variance of the stream behind the last layer that is lost."""


@dataclass(frozen=True)
class Fidelity:
    """How well one dictionary predicts, alone and in the replaced model."""

    place: str
    fvu: float
    fvu_in_place: float


@dataclass(frozen=True)
class Replacement:
    """What replacing costs."""

    tokens: int
    """Predictions that were measured."""
    ce_clean: float
    ce_replaced: float
    ce_mean: float
    ce_recovered: float | None
    """None where writing means does no damage."""
    kl: float
    curve: tuple[Point, ...]
    places: tuple[Fidelity, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def places_of(dictionaries: Dictionaries) -> list[Place]:
    """What the dictionaries replace, in the order of computation."""
    mlp, attention = dictionaries.mlp_layers, dictionaries.attention
    found = [Place("mlp", layer) for layer in mlp] + [Place("attn", layer) for layer in attention]
    return sorted(found, key=lambda place: (place.layer, place.module != "attn"))


@torch.no_grad()
def measure_replacement(
    model: Model, dictionaries: Dictionaries, tokens: Int[Tensor, "b t"], batch_blocks: int = 4
) -> Replacement:
    """The costs of replacing, over blocks of at least three tokens.

    One forward per place and batch, two more of the clean model and one with means. Raises `ClearheadError` without
    dictionaries or for shorter blocks, `NonFiniteError` where a replaced model gives NaN.
    """
    places = places_of(dictionaries)
    if not places:
        raise ClearheadError("there is nothing to replace: give at least one dictionary")
    if tokens.dim() != 2 or tokens.shape[1] < 3 or not len(tokens):
        raise ClearheadError(f"expected blocks of at least 3 tokens, [b, t]; got {list(tokens.shape)}")
    meter = _Meter(model, dictionaries, places)
    with progress("replace", len(tokens) * (len(places) + 3), "forwards") as advance:
        for batch in tokens.split(batch_blocks):
            meter.average(batch)
            advance(len(batch))
        for batch in tokens.split(batch_blocks):
            meter.add(batch, advance)
    return meter.result()


class _Meter:
    """Streaming sums over batches, float64."""

    def __init__(self, model: Model, dictionaries: Dictionaries, places: list[Place]):
        self.model, self.dictionaries, self.places = model, dictionaries, places
        self.stream = f"resid_post.{model.n_layers - 1}"
        self.count = 0
        self.ce = [0.0] * (len(places) + 1)
        self.kl = [0.0] * (len(places) + 1)
        self.mean = 0.0
        self.lost = [0.0] * (len(places) + 1)
        self.variance = _Variance()
        self.outputs = {place: _Variance() for place in places}
        self.error = dict.fromkeys(places, 0.0)
        self.error_in_place = dict.fromkeys(places, 0.0)

    def average(self, tokens: Tensor) -> None:
        """Means and variances of one batch; of all of them before the first `add`."""
        clean = self._run(tokens, [place.writes for place in self.places], {})
        self.variance.add(clean[self.stream])
        for place in self.places:
            self.outputs[place].add(clean[place.writes])

    def add(self, tokens: Tensor, advance: Callable[[int], object]) -> None:
        """One batch."""
        gold = tokens[:, 2:].to(self.model.device)
        self.count += gold.numel()
        clean = self._run(tokens, [site for place in self.places for site in (place.reads, place.writes)], {})
        log_clean = _log_probability(clean)
        self.ce[0] += _loss(log_clean, gold)
        self.mean += _loss(_log_probability(self._run(tokens, [], self._means())), gold)
        alone = _Predictor(self.dictionaries, clean)
        predicted: dict[Place, Tensor] = {}
        advance(2 * len(tokens))
        for count in range(1, len(self.places) + 1):
            run, predicted = self._replaced(tokens, self.places[:count])
            log_replaced = _log_probability(run)
            self.ce[count] += _loss(log_replaced, gold)
            self.kl[count] += float(F.kl_div(log_replaced, log_clean, reduction="sum", log_target=True))
            self.lost[count] += _distance(run[self.stream], clean[self.stream])
            advance(len(tokens))
        for place in self.places:
            self.error[place] += _distance(alone.predict(place), clean[place.writes])
            self.error_in_place[place] += _distance(predicted[place], clean[place.writes])

    def _means(self) -> dict[str, Edit]:
        """Every place written with its mean."""

        def written_at(place: Place) -> Edit:
            mean = self.outputs[place].mean
            return keep_first(lambda y, _: mean.to(y).expand_as(y))

        return {place.writes: written_at(place) for place in self.places}

    def _replaced(self, tokens: Tensor, places: list[Place]) -> tuple[Run, dict[Place, Tensor]]:
        """A forward with these places replaced, and what the dictionaries wrote."""
        predicted: dict[Place, Tensor] = {}

        def written_at(place: Place) -> Edit:
            def write(_: Tensor, run: Run) -> Tensor:
                predicted[place] = _Predictor(self.dictionaries, run).predict(place)
                return predicted[place]

            return keep_first(write)

        reads = [place.reads for place in places]
        return self._run(tokens, reads, {place.writes: written_at(place) for place in places}), predicted

    def _run(self, tokens: Tensor, read: list[str], edit: dict[str, Edit]) -> Run:
        return self.model.run(tokens, read=[*read, self.stream, "logits"], edit=edit)

    def result(self) -> Replacement:
        """Means over everything added."""
        ce, kl = ([value / self.count for value in sums] for sums in (self.ce, self.kl))
        mean = self.mean / self.count
        if not all(map(math.isfinite, [*ce, *kl])):
            raise NonFiniteError(f"the loss of {self.model.name} is NaN or infinite once dictionaries replace it")
        names = ["", *(place.name for place in self.places)]
        variance = self.variance.total
        curve = [Point(n, names[n], ce[n], kl[n], self.lost[n] / variance) for n in range(len(names))]
        damage = mean - ce[0]
        return Replacement(
            tokens=self.count,
            ce_clean=ce[0],
            ce_replaced=ce[-1],
            ce_mean=mean,
            ce_recovered=(mean - ce[-1]) / damage if damage > 0 and math.isfinite(damage) else None,
            kl=kl[-1],
            curve=tuple(curve),
            places=tuple(
                Fidelity(p.name, self.error[p] / self.outputs[p].total, self.error_in_place[p] / self.outputs[p].total)
                for p in self.places
            ),
        )


class _Predictor:
    """What dictionaries write for the inputs of one forward."""

    def __init__(self, dictionaries: Dictionaries, inputs: Mapping[str, Tensor]):
        self.dictionaries, self.inputs = dictionaries, inputs

    def predict(self, place: Place) -> Float[Tensor, "b t d"]:
        """The output of one place."""
        layer = place.layer
        if place.module == "attn":
            lorsa = self.dictionaries.attention[layer]
            return lorsa(self.inputs[place.reads].to(lorsa.W_O.dtype)).y
        if self.dictionaries.clt is None:
            transcoder = self.dictionaries.mlp[layer]
            return transcoder(self.inputs[place.reads].to(transcoder.W_dec.dtype)).y
        clt = self.dictionaries.clt
        y = clt.b_dec[layer]
        for below in range(layer + 1):
            x = self.inputs[f"mlp_in.{below}"].to(clt.b_dec.dtype)
            y = y + clt.writes(below, clt.encode(below, x))[..., layer - below, :]
        return y


class _Variance:
    """Σ‖y − ȳ‖² over the positions that count, ȳ the mean of all of them."""

    def __init__(self) -> None:
        self.count, self.square = 0, 0.0
        self.sum = torch.zeros(())

    def add(self, y: Float[Tensor, "b t d"]) -> None:
        """One batch."""
        y = y[:, 1:].double()
        self.count += y.shape[0] * y.shape[1]
        self.square += float(y.square().sum())
        self.sum = self.sum.to(y) + y.sum((0, 1))

    @property
    def mean(self) -> Float[Tensor, " d"]:
        """Of everything added."""
        return self.sum / self.count

    @property
    def total(self) -> float:
        """Of everything added; the smallest number above 0 for constants."""
        return max(self.square - float(self.sum.square().sum()) / self.count, torch.finfo(torch.float64).tiny)


def _log_probability(run: Run) -> Float[Tensor, "b t v"]:
    """Of the predictions that count."""
    return F.log_softmax(run["logits"][:, 1:-1].float(), -1)


def _loss(log_probability: Float[Tensor, "b t v"], gold: Int[Tensor, "b t"]) -> float:
    return float(F.nll_loss(log_probability.flatten(0, 1), gold.flatten(), reduction="sum"))


def _distance(found: Float[Tensor, "b t d"], expected: Float[Tensor, "b t d"]) -> float:
    """Σ‖found − expected‖² over all positions but the first."""
    return float((found[:, 1:].double() - expected[:, 1:].double()).square().sum())
