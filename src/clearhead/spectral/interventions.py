"""What a traced signal does: take it away or double it, run the model on, and compare with as much of anything else.

Two scopes for one side of a firing (layer, head, query, key), whose triples give ΔA = Σ pieces·mask to its head vector:

    local    the reading head alone reads without it: q − ΔA·G_kᵀ/scale at the query, or for the key side the scores of
             that head with the key k − ΔB·G_qᵀ/scale, of all queries (grouped keys serve several heads, so that the key
             itself is not edited)
    global   every component writes without it: the stream behind the component loses δ_c = (pieces·mask)_c · M⁺, the
             smallest vector that the head reads as exactly that (M: signals.py). Everyone downstream sees it

For a head without rotation δ_c is the projection of what the component wrote onto the triples' singular vectors (SAD's
and ACC's P); with one it is the same in the turned head space. Where LayerNorm centres, δ_c is centred, because M is.
Where a QK norm centres, the head has one mode less than dimensions, and δ_c is what comes closest.
What the head adds itself (`offset`) exists locally only. `amount` −1 removes, +1 doubles (boost).

The control removes as many other modes of the same head, drawn without replacement from those that take no part: mode m
of the signal is replaced by one drawn mode throughout, and what the same components give to the drawn modes is scaled
to the norm that the removed piece has in the stream, edited place by edited place. Where too few other modes are left,
they are drawn with replacement. The norm is matched, the singular value is not: modes are drawn uniformly, those of a
signal are mostly among the largest, and a head reads more from as long a vector along a mode of larger σ. Part of the
excess over the control is therefore that the removed modes are large, not that they are the ones in use.

Effects are measured in the model itself, nothing frozen: the attention weight at the firing, the logit difference, and
for global edits how far the stream that the head receives was moved (cosine and ratio of norms with the unedited one).
The random numbers are those of `ops.hash_rng`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.run import Edit, Run
from clearhead.ops.hash_rng import mix
from clearhead.spectral.controls import bootstrap
from clearhead.spectral.signals import Firing, Side, Signal, capped
from clearhead.spectral.tracing import Target
from clearhead.spectral.writes import Component, Stream

Scope = Literal["local", "global"]
SCOPES: tuple[Scope, Scope] = ("local", "global")
DRAWS = 20
"""Control draws per intervention."""


def random_modes(signal: Signal, draws: int, seed: int) -> Bool[Tensor, "n c r"]:
    """Masks of the control: the signal's mask with each of its modes replaced by a drawn one that takes no part.

    Raises `ClearheadError` where every mode takes part: then there is nothing to compare with.
    """
    r, own = signal.mask.shape[1], np.array(signal.modes)
    others = np.setdiff1d(np.arange(r), own)
    if not len(others):
        raise ClearheadError(f"all {r} modes of head {signal.firing.layer}.{signal.firing.head} take part: no control")
    masks = torch.zeros(draws, *signal.mask.shape, dtype=torch.bool, device=signal.mask.device)
    for draw in range(draws):
        keys = mix(seed, *signal.firing, signal.side == "key", draw, np.arange(r))
        if len(own) <= len(others):
            drawn = others[np.argsort(keys[others])][: len(own)]
        else:
            drawn = others[(keys[own] % np.uint64(len(others))).astype(np.int64)]
        for mode, other in zip(own.tolist(), drawn.tolist(), strict=True):
            masks[draw, :, other] |= signal.mask[:, mode]
    return masks


@dataclass(frozen=True, eq=False)
class Removal:
    """What each of n variants takes out of one side of a firing, by component; row 0 is the signal itself."""

    signal: Signal
    read: Float[Tensor, "n c r"]
    """In the head vector."""

    @classmethod
    def of(cls, signal: Signal, draws: int = 0, seed: int = 0) -> "Removal":
        """The signal and `draws` controls, not yet scaled."""
        masks = signal.mask[None]
        if draws:
            masks = torch.cat([masks, random_modes(signal, draws, seed)])
        return cls(signal, signal.pieces * masks)

    def lifted(self) -> Float[Tensor, "n c d"]:
        """δ: the smallest vectors of the stream that the head reads as `read`; in float64 on the way."""
        inverse = torch.linalg.pinv(self.signal.reader.map.double())
        return (self.read.double() @ inverse).to(self.read.dtype)

    def in_head(self) -> Float[Tensor, "n r"]:
        """What the head vector loses, each control scaled to the signal's norm in the stream."""
        total = self.lifted().sum(1)
        return self.read.sum(1) * _matched(total)

    def in_stream(self, stream: Stream) -> dict[str, Float[Tensor, "n d"]]:
        """Site → what the stream loses there at the side's token, each control scaled to the signal's norm."""
        lifted = self.lifted()
        places: dict[str, Tensor] = {}
        for number, component in enumerate(self.signal.components):
            site = _site_behind(stream, component)
            if site is not None:
                places[site] = places.get(site, 0) + lifted[:, number]
        return {site: total * _matched(total) for site, total in places.items()}


def _matched(total: Float[Tensor, "n d"]) -> Float[Tensor, "n 1"]:
    """The factors that give every row the norm of row 0."""
    norm = total.norm(dim=-1, keepdim=True)
    return torch.where(norm > 0, norm[:1] / torch.where(norm > 0, norm, 1), torch.ones_like(norm))


def _site_behind(stream: Stream, component: Component) -> str | None:
    """Where the stream first holds what the component wrote; None for a head's own offset."""
    if component.kind == "offset":
        return None
    if component.kind == "embedding":
        return "resid_pre.0"
    after_all = component.kind == "mlp" or stream.parts.model.family.parallel
    return f"{'resid_post' if after_all else 'resid_mid'}.{component.layer}"


def local_edits(stream: Stream, removal: Removal, amount: Float[Tensor, " n"]) -> dict[str, Edit]:
    """Edits by which the reading head alone reads without (−1) or with twice (+1) each variant; a row per variant."""
    layer, head, query, key = removal.signal.firing
    modes = stream.parts.modes(layer)
    scale, softcap = modes.geometry.scale, modes.geometry.softcap
    change = removal.in_head() * amount[:, None]
    if removal.signal.side == "query":
        moved = change @ modes.G_k[head].T / scale

        def edit_query(q: Tensor, _run: Run) -> Tensor:
            q = q.clone()
            q[:, head, query] += moved.to(q.dtype)
            return q

        return {f"q.{layer}": edit_query}
    A, B = modes.project(stream.site("q", layer), stream.site("k", layer))
    old = A[head, key:] @ B[head, key]
    added = capped(old + change @ A[head, key:].T, softcap) - capped(old, softcap)

    def edit_scores(scores: Tensor, _run: Run) -> Tensor:
        scores = scores.clone()
        scores[:, head, key:, key] += added.to(scores.dtype)
        return scores

    return {f"scores.{layer}": edit_scores}


def global_edits(stream: Stream, removal: Removal, amount: Float[Tensor, " n"]) -> dict[str, Edit]:
    """Edits by which the components write without (−1) or with twice (+1) each variant; a row per variant."""
    position = removal.signal.firing.position(removal.signal.side)

    def edit(change: Tensor) -> Edit:
        def edited(state: Tensor, _run: Run) -> Tensor:
            state = state.clone()
            state[:, position] += change.to(state.dtype)
            return state

        return edited

    return {site: edit(total * amount[:, None]) for site, total in removal.in_stream(stream).items()}


@dataclass(frozen=True)
class Change:
    """One measured number without and with an intervention, and with each of its controls in its place."""

    clean: float
    changed: float
    controls: tuple[float, ...]

    @property
    def effect(self) -> float:
        """What the intervention changed."""
        return self.changed - self.clean

    @property
    def control(self) -> float:
        """What the controls changed, on average."""
        return float(np.mean(self.controls)) - self.clean

    @property
    def excess(self) -> float:
        """What the signal changed beyond its controls."""
        return self.effect - self.control


@dataclass(frozen=True)
class Shift:
    """How far an intervention moved the stream that the reading head receives at the side's token."""

    cosine: Change
    """Cosine with the unedited stream."""
    norm: Change
    """Norm, as a multiple of the unedited stream's."""

    @classmethod
    def of(cls, clean: Float[Tensor, " d"], states: Float[Tensor, "n d"]) -> "Shift":
        """From the stream without and with the intervention (row 0) and its controls."""
        norms = states.norm(dim=-1)
        cosine, ratio = (states @ clean / (norms * clean.norm())).tolist(), (norms / clean.norm()).tolist()
        return cls(Change(1.0, cosine[0], tuple(cosine[1:])), Change(1.0, ratio[0], tuple(ratio[1:])))


@dataclass(frozen=True)
class Effect:
    """What one intervention on one side of one firing changed."""

    firing: Firing
    side: Side
    scope: Scope
    amount: int
    """−1 removed, +1 doubled."""
    components: int
    modes: int
    weight: Change
    """Attention at the firing."""
    difference: Change
    """Logit difference at the last token."""
    state: Shift | None
    """None for local edits, which leave the stream that the head receives as it is."""


def intervene(
    stream: Stream, signal: Signal, target: Target, scope: Scope, *, amount: int = -1, draws: int = DRAWS, seed: int = 0
) -> Effect:
    """Removes (`amount` −1) or doubles (+1) a signal in the running model, and `draws` controls beside it.

    Raises `ClearheadError` for a signal that takes all of a head's modes, which leaves no control.
    """
    removal = Removal.of(signal, draws, seed)
    amounts = signal.pieces.new_full((1 + draws,), float(amount))
    edits = (local_edits if scope == "local" else global_edits)(stream, removal, amounts)
    weights, differences, states = observe(stream, signal.firing, signal.side, target, edits, 1 + draws)
    before = stream.state(signal.firing.layer, signal.firing.position(signal.side))
    clean = target.difference(stream.parts, stream.state(stream.n_layers, len(stream) - 1))
    return Effect(
        firing=signal.firing,
        side=signal.side,
        scope=scope,
        amount=amount,
        components=len(signal.components),
        modes=len(signal.modes),
        weight=Change(signal.weight, weights[0], tuple(weights[1:])),
        difference=Change(float(clean), differences[0], tuple(differences[1:])),
        state=Shift.of(before, states) if scope == "global" else None,
    )


def observe(
    stream: Stream, firing: Firing, side: Side, target: Target, edits: Mapping[str, Edit], rows: int
) -> tuple[list[float], list[float], Float[Tensor, "n d"]]:
    """What `rows` copies of the prompt do under `edits`.

    Attention at the firing, logit difference at the last token, and the stream that the firing's layer receives at the
    side's token.
    """
    model, site, received = stream.parts.model, f"pattern.{firing.layer}", f"resid_pre.{firing.layer}"
    tokens = torch.tensor([stream.tokens], device=model.device).repeat(rows, 1)
    last = f"resid_post.{model.n_layers - 1}"
    run = model.run(tokens, read=[site, received, last], edit=edits)
    weights = run[site][:, firing.head, firing.query, firing.key]
    states = run[received][:, firing.position(side)].to(stream.parts.dtype)
    return weights.tolist(), target.difference(stream.parts, run[last][:, -1]).tolist(), states


@dataclass(frozen=True)
class Size:
    """The mean over prompts of something that interventions changed, with its 95 % bootstrap interval over prompts."""

    mean: float
    low: float | None
    """None for a single prompt, which has no interval."""
    high: float | None


@dataclass(frozen=True)
class Summary:
    """One kind of intervention over firings and prompts."""

    side: Side
    scope: Scope
    amount: int
    prompts: int
    firings: int
    modes: float
    """Mean number of modes taken out per firing."""
    weight: Size
    weight_control: Size
    weight_excess: Size
    """Change of attention less that of the controls."""
    difference: Size
    difference_control: Size
    difference_excess: Size
    weight_d: float | None
    """Excess in units of its standard deviation over prompts; None for a single prompt."""
    difference_d: float | None
    weight_beyond: float
    """Share of firings where removing the signal leaves less attention than every control (doubling it: more)."""
    difference_beyond: float
    state_cosine: float | None
    """Cosine of the stream that the head receives with the unedited one, mean over firings; None for local edits."""
    state_cosine_control: float | None
    state_norm: float | None
    """Its norm, as a multiple of the unedited one's."""
    state_norm_control: float | None


def summarise(effects: Sequence[tuple[int, Effect]], seed: int = 0) -> list[Summary]:
    """Effects of (prompt, effect), one summary for each side, scope and amount; firings of a prompt are averaged."""
    kinds: dict[tuple[Side, Scope, int], list[tuple[int, Effect]]] = defaultdict(list)
    for prompt, effect in effects:
        kinds[effect.side, effect.scope, effect.amount].append((prompt, effect))
    return [_summary(*kind, some, seed) for kind, some in kinds.items()]


def _summary(side: Side, scope: Scope, amount: int, some: list[tuple[int, Effect]], seed: int) -> Summary:
    prompts = torch.tensor([prompt for prompt, _ in some])
    found = [effect for _, effect in some]

    def size(values: list[float]) -> Size:
        means = _per_prompt(values, prompts)
        if len(means) < 2:
            return Size(float(means.mean()), None, None)
        low, high = bootstrap(means, torch.arange(len(means)), torch.Generator().manual_seed(seed))
        return Size(float(means.mean()), low, high)

    def standardised(values: list[float]) -> float | None:
        means = _per_prompt(values, prompts)
        spread = float(means.std()) if len(means) > 1 else 0.0
        return float(means.mean()) / spread if spread > 0 else None

    def beyond(changes: list[Change]) -> float:
        return float(np.mean([amount * change.changed > max(amount * np.array(change.controls)) for change in changes]))

    weights, differences = [effect.weight for effect in found], [effect.difference for effect in found]
    shifts = [effect.state for effect in found if effect.state is not None]

    def moved(values: list[float]) -> float | None:
        return float(np.mean(values)) if values else None

    return Summary(
        side=side,
        scope=scope,
        amount=amount,
        prompts=len(set(prompts.tolist())),
        firings=len(found),
        modes=float(np.mean([effect.modes for effect in found])),
        weight=size([change.effect for change in weights]),
        weight_control=size([change.control for change in weights]),
        weight_excess=size([change.excess for change in weights]),
        difference=size([change.effect for change in differences]),
        difference_control=size([change.control for change in differences]),
        difference_excess=size([change.excess for change in differences]),
        weight_d=standardised([change.excess for change in weights]),
        difference_d=standardised([change.excess for change in differences]),
        weight_beyond=beyond(weights),
        difference_beyond=beyond(differences),
        state_cosine=moved([shift.cosine.changed for shift in shifts]),
        state_cosine_control=moved([1 + shift.cosine.control for shift in shifts]),
        state_norm=moved([shift.norm.changed for shift in shifts]),
        state_norm_control=moved([1 + shift.norm.control for shift in shifts]),
    )


def _per_prompt(values: list[float], prompts: Tensor) -> Float[Tensor, " p"]:
    """Mean over the firings of each prompt."""
    _, group = torch.unique(prompts, return_inverse=True)
    total = torch.zeros(int(group.max()) + 1, dtype=torch.float64)
    total = total.index_add(0, group, torch.tensor(values, dtype=torch.float64))
    return total / torch.bincount(group)
