"""Readers: what features, Lorsa heads, logits and targets of the user's own read off the stream, linearly.

    feature.L.i@t   pre = w_enc[i] · mlp_in(t) + b_enc[i]
    lorsa.L.i@t     pre = Σ_j A_tj (w_v[i] · attn_in(j) + b_V[i])     A the Lorsa's own pattern, held frozen
    logit.v@t       (W_U[:, v] − mean over v) · n(t), the same for b_U; n the stream through the final norm
    target.0@t      a difference of logits, or any probe

A norm before the module is read through with its scale frozen and its gain folded in; its bias, like the module's own,
goes into the constant. So the value is Σ ⟨vector, stream at depth, position⟩ + constant, and the edges of all sources
(sources.py) add up to value − constant. Logits are those before any soft-cap. Whether a feature fires, and where a
Lorsa head looks, is given, not explained: edges say what makes up the pre-activation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.tracing.sources import Opened, read_normed
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.sites import parse
from clearhead.spectral.tracing import Target
from clearhead.units import Unit

EXPLAINED = ("feature", "lorsa")
"""Kinds of sources that read something themselves."""


@dataclass(frozen=True, eq=False)
class Reads:
    """What m targets read: entries of one vector at one depth and position, each belonging to a target."""

    targets: tuple[Unit, ...]
    vector: Float[Tensor, "e d"]
    depth: Int[Tensor, " e"]
    position: Int[Tensor, " e"]
    row: Int[Tensor, " e"]
    """Which target an entry belongs to."""
    constant: Float[Tensor, " m"]
    value: Float[Tensor, " m"]
    """What the target is in this forward: its pre-activation, a centred logit, a difference."""

    def __len__(self) -> int:
        return len(self.targets)

    def edges(self, opened: Opened) -> Float[Tensor, "m n"]:
        """Backward: what every source contributes to every target; value − constant in all."""
        if not len(self.vector):
            return self.vector.new_zeros(len(self), len(opened.sources))
        gradients = opened.frozen.pull(self.vector, self.depth, self.position, self.row)
        found = opened.sources.edges(gradients)
        # a target whose last entries are empty still has its row
        return torch.nn.functional.pad(found, (0, 0, 0, len(self) - len(found)))

    def edges_forward(self, opened: Opened) -> Float[Tensor, "m n"]:
        """Forward: the same from every source's components; n · t · d numbers at a time."""
        found = self.vector.new_zeros(len(self), len(opened.sources))
        for depth, components in opened.sources.components(opened.frozen):
            here = (self.depth == depth).nonzero()[:, 0]
            for position in self.position[here].unique().tolist():
                entries = here[self.position[here] == position]
                found.index_add_(0, self.row[entries], self.vector[entries] @ components[:, position].T)
        return found


def read_units(opened: Opened, units: Sequence[Unit]) -> Reads:
    """What features, Lorsa heads and logits bound to positions read.

    Raises `ClearheadError` for units of other kinds, and for those that are not active in this prompt.
    """
    if not units:
        raise ClearheadError("give at least one unit to explain")
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for place, unit in enumerate(units):
        if unit.kind not in (*EXPLAINED, "logit"):
            raise ClearheadError(
                f"{unit} reads nothing that could be explained; give a feature, a Lorsa head or a logit"
            )
        if unit.position is None or unit.position >= len(opened):
            raise ClearheadError(
                f"{unit} is not bound to one of the prompt's positions 0 to {len(opened) - 1}; type {unit.id}@0"
            )
        if unit.kind != "logit" and unit not in opened.sources.place:
            raise ClearheadError(f"{unit} is not active in this prompt, or no dictionary given has it")
        kinds.setdefault((unit.kind, unit.layer), []).append(place)
    parts, order = [], []
    for (kind, _), places in kinds.items():
        parts.append(_READ[kind](opened, [units[place] for place in places]))
        order += places
    return _reorder(_join(parts), torch.tensor(order, device=parts[0].vector.device))


def read_difference(opened: Opened, target: Target) -> Reads:
    """The logits of answers minus those of wrong tokens (or of the mean token) at the prompt's last position."""
    vector, constant = target.direction(opened.parts)
    last, depth = len(opened) - 1, opened.frozen.top
    value = target.difference(opened.parts, opened.frozen.state(depth)[last])
    here = torch.tensor([last], device=vector.device)
    return _single_reads(
        opened, [Unit("target", index=0, position=last)], depth, here, vector[None], vector.new_tensor([constant]),
        value[None], folded=True,
    )  # fmt: skip


def read_probe(opened: Opened, site: str, vector: Float[Tensor, " d"], position: int) -> Reads:
    """The product of a vector with what stands at a site of the stream and a position, counted from 0 or from the end.

    Sites: `resid_pre.L`, `resid_mid.L`, `resid_post.L`, and `attn_in.L`, `mlp_in.L` behind their norm.
    Raises `ClearheadError` for another site, width or position, `NonFiniteError` for NaN or infinity in the vector.
    """
    frozen = opened.frozen
    place = parse(site, frozen.n_layers)
    depths = {"resid_pre": 0, "attn_in": 0, "resid_mid": 1, "mlp_in": 1, "resid_post": 2}
    if place.layer is None or place.name not in depths:
        raise ClearheadError(f"a probe reads the stream; {site} is none of {', '.join(f'{name}.L' for name in depths)}")
    if place.name == "resid_mid" and frozen.parallel:
        raise ClearheadError(f"{opened.parts.model.name} has no {site}: attention and MLP run in parallel")
    if vector.shape != frozen.state(0).shape[1:]:
        raise ClearheadError(f"the probe has shape {list(vector.shape)}; {site} has {frozen.state(0).shape[1]} numbers")
    if not bool(vector.isfinite().all()):
        raise NonFiniteError("the probe holds NaN or infinity")
    if not -len(opened) <= position < len(opened):
        raise ClearheadError(f"position {position} lies outside of the prompt's {len(opened)} tokens")
    position %= len(opened)
    depth, vector = 2 * place.layer + depths[place.name], vector.to(frozen.state(0))
    plain = place.name.startswith("resid")
    norm = None if plain else opened.norm_at(depth)
    state = frozen.state(depth)[position]
    value = read_normed(norm, state) @ vector
    return _single_reads(
        opened, [Unit("target", index=0, position=position)], depth,
        torch.tensor([position], device=vector.device), vector[None], vector.new_zeros(1), value[None], plain=plain,
    )  # fmt: skip


def _read_features(opened: Opened, units: list[Unit]) -> Reads:
    layer, index, position = _numbers(opened, units)
    W_enc, b_enc = opened.dictionaries.encoder(layer)
    vectors, bias = W_enc[index], b_enc[index]
    value = (vectors * opened.mlp[layer].x[position]).sum(1) + bias
    return _single_reads(opened, units, 2 * layer + 1, position, vectors, bias, value)


def _read_logits(opened: Opened, units: list[Unit]) -> Reads:
    _, index, position = _numbers(opened, units)
    W, b = opened.parts.unembedding
    if int(index.max()) >= W.shape[1]:
        raise ClearheadError(f"token {int(index.max())} is outside the vocabulary of 0 to {W.shape[1] - 1}")
    dtype, depth = opened.parts.dtype, opened.frozen.top
    vectors = W[:, index].T.to(dtype) - W.mean(1, dtype=dtype)
    bias = b[index].to(dtype) - b.mean(dtype=dtype)
    normed = opened.parts.final_norm.normalise(opened.frozen.state(depth)[position])
    return _single_reads(
        opened, units, depth, position, vectors, bias, (vectors * normed).sum(1) + bias, folded=True
    )  # fmt: skip


def _read_lorsa(opened: Opened, units: list[Unit]) -> Reads:
    layer, index, position = _numbers(opened, units)
    heads, x = opened.dictionaries.attention[layer], opened.attention[layer].x
    patterns, which = torch.unique(index // heads.config.pattern_size, return_inverse=True)
    pattern = heads.patterns(x[None], patterns)[0][which, position]
    row, source = pattern.nonzero(as_tuple=True)
    share = pattern[row, source]
    vector, constant = _through(opened, 2 * layer, source, heads.W_V[index[row]] * share[:, None])
    bias = heads.b_V[index] * pattern.sum(1)
    constant = bias.index_add(0, row, constant)
    value = heads.pre_activations(x[None])[0][position, index]
    return Reads(tuple(units), vector, torch.full_like(source, 2 * layer), source, row, constant, value)


_READ: dict[str, Callable[[Opened, list[Unit]], Reads]] = {
    "feature": _read_features,
    "lorsa": _read_lorsa,
    "logit": _read_logits,
}


def _single_reads(
    opened: Opened,
    units: Sequence[Unit],
    depth: int,
    position: Tensor,
    vectors: Tensor,
    bias: Tensor,
    value: Tensor,
    *,
    plain: bool = False,
    folded: bool = False,
) -> Reads:
    """Targets of one entry each, at one depth; `plain` ones read no norm, `folded` ones hold its gain and bias."""
    vector, constant = (vectors, 0.0) if plain else _through(opened, depth, position, vectors, folded=folded)
    row = torch.arange(len(units), device=vectors.device)
    return Reads(tuple(units), vector, torch.full_like(position, depth), position, row, bias + constant, value)


def _through(
    opened: Opened, depth: int, position: Tensor, vectors: Tensor, *, folded: bool = False
) -> tuple[Float[Tensor, "e d"], Float[Tensor, " e"]]:
    """Vectors that read the normalised stream as ones that read the stream, and what the norm's bias adds."""
    norm = opened.norm_at(depth)
    constant = vectors.new_zeros(len(vectors))
    if norm is None:
        return vectors, constant
    scale = norm.frozen_scale(opened.frozen.state(depth))[position]
    if norm.bias is not None and not folded:
        constant = vectors @ norm.bias.detach().to(vectors)
    if norm.gain is not None and not folded:
        vectors = vectors * norm.gain.detach()
    return norm.centre(vectors) * scale, constant


def _numbers(opened: Opened, units: list[Unit]) -> tuple[int, Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Their layer (-1 for logits), indices and positions."""
    device = opened.frozen.state(0).device
    layer = units[0].layer
    index = torch.tensor([unit.index for unit in units], device=device)
    position = torch.tensor([unit.position for unit in units], device=device)
    return (-1 if layer is None else layer), index, position


def _join(parts: Sequence[Reads]) -> Reads:
    """The targets of all parts as one batch, in their order."""
    starts = [sum(map(len, parts[:place])) for place in range(len(parts))]
    return Reads(
        tuple(unit for part in parts for unit in part.targets),
        torch.cat([part.vector for part in parts]),
        torch.cat([part.depth for part in parts]),
        torch.cat([part.position for part in parts]),
        torch.cat([part.row + start for part, start in zip(parts, starts, strict=True)]),
        torch.cat([part.constant for part in parts]),
        torch.cat([part.value for part in parts]),
    )


def _reorder(reads: Reads, order: Int[Tensor, " m"]) -> Reads:
    """The same targets, row i of `reads` becoming row `order[i]`."""
    back = torch.argsort(order)
    targets = tuple(reads.targets[place] for place in back.tolist())
    return dataclasses.replace(
        reads, targets=targets, row=order[reads.row], constant=reads.constant[back], value=reads.value[back]
    )
