"""What the units of one layer did on a batch of tokens: original heads and Lorsa heads seen through one window.

    Lorsa head      part from j = A_ij v_j                 their sum is the pre-activation; activation z; write z w_o
    original head   part from j = A_ij |v_j W_O|           activation |head_out|; write head_out

A row exists where the unit was active: for a Lorsa head at the tokens that kept it, for an original head at every
query. Position 0, where a token sees nothing but itself, has no rows. What a behaviour is, and how it is scored, is
not said here (behaviour.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.analysis.patterns import active_triples, z_patterns
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.model.run import Run

FIRST = 1
"""The first position with rows."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What one population did on one batch; row e: unit `unit[e]` was active at position `query[e]` of `block[e]`."""

    tokens: Int[Tensor, "b t"]
    unit: Int[Tensor, " e"]
    block: Int[Tensor, " e"]
    query: Int[Tensor, " e"]
    parts: Float[Tensor, "e t"]
    """Contribution by source position; 0 behind the query."""
    activation: Float[Tensor, " e"]
    """z of a Lorsa head, signed; |head_out| of an original head."""
    written: Callable[[Int[Tensor, " m"]], Float[Tensor, "m d"]]
    """From rows to what they wrote; ask `writes`."""
    n_units: int
    """Units of the population, active or not."""
    own_axes: Callable[[Int[Tensor, " m"]], Float[Tensor, "m r"]] | None = None
    """From rows to coordinates of what they wrote; ask `coordinates`."""

    def coordinates(self, rows: Int[Tensor, " m"]) -> Float[Tensor, "m r"]:
        """What these rows wrote, along orthonormal axes of their unit: few numbers, with the writes' inner products.

        Rows of different units share no axes.
        """
        return self.writes(rows) if self.own_axes is None else self.own_axes(rows)

    def writes(self, rows: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
        """What these rows wrote into the layer's attention output: z w_o, or the head's output vector."""
        return self.written(rows)


class Population(Protocol):
    """All units of one layer and kind."""

    @property
    def names(self) -> list[str]:
        """Unit ids, `lorsa.12.345` or `head.12.3`."""
        ...

    @property
    def n_units(self) -> int:
        """How many units there are; a reading's `unit` counts them from 0."""
        ...

    @property
    def rows_per_token(self) -> int:
        """Rows that a token may have, about; more units than that are not active at once."""
        ...

    def read(self, tokens: Int[Tensor, "b t"]) -> Reading:
        """What the units did on these tokens."""
        ...


class SharedRun:
    """Sites of several layers from one forward, kept for the batch that was asked for last."""

    def __init__(self, model: Model, sites: Iterable[str] = ()):
        self.model = model
        self.sites = set(sites)
        self._seen: tuple[Int[Tensor, "b t"], Run] | None = None
        self._held: set[str] = set()

    def read(self, tokens: Int[Tensor, "b t"], sites: Sequence[str]) -> Run:
        """A run of these tokens with these sites, and with all that others were announced to need."""
        self.sites |= set(sites)
        if self._seen is None or self._seen[0] is not tokens or not self.sites <= self._held:
            self._seen = None  # let the last batch go before the next is computed
            self._held = set(self.sites)
            self._seen = tokens, self.model.run(tokens, read=sorted(self._held))
        return self._seen[1]


class LorsaHeads:
    """The heads of a Lorsa in its place in the model; `shared` saves forwards where several layers are read.

    Raises `ClearheadError` when the Lorsa belongs to another model or layer; `read` raises `NonFiniteError` for an
    input that is not finite.
    """

    def __init__(self, model: Model, layer: int, lorsa: Lorsa, shared: SharedRun | None = None):
        if lorsa.config.d_model != model.d_model:
            raise ClearheadError(
                f"the Lorsa reads {lorsa.config.d_model} dimensions and {model.name} has {model.d_model}; give the "
                f"model it was trained on ({lorsa.provenance.get('model', 'not recorded')})"
            )
        for what, here in (("model", model.name), ("layer", layer)):
            trained = lorsa.provenance.get(what, here)
            if trained != here:
                raise ClearheadError(f"the Lorsa was trained on {what} {trained}, not {here}; give that {what}")
        self.layer, self.lorsa = layer, lorsa.eval()
        self._sizes = lorsa.W_O.detach().norm(dim=-1)
        self.site = f"attn_in.{layer}"
        self.shared = shared or SharedRun(model)
        self.shared.sites.add(self.site)

    @property
    def n_units(self) -> int:
        """Heads of the Lorsa."""
        return self.lorsa.n_heads

    @property
    def names(self) -> list[str]:
        """Unit ids."""
        return [f"lorsa.{self.layer}.{head}" for head in range(self.n_units)]

    @property
    def rows_per_token(self) -> int:
        """Heads kept per token."""
        return self.lorsa.config.k

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "b t"]) -> Reading:
        """One forward up to the layer, and z patterns of the active heads."""
        x = self.shared.read(tokens, [self.site])[self.site].to(self.lorsa.W_V.dtype)
        _refuse_non_finite(self.site, x)
        codes = self.lorsa.encode(x)
        codes.values[:, :FIRST] = 0
        triples = active_triples(codes)
        z = codes.values[codes.values != 0]
        parts = z_patterns(self.lorsa, x, triples)

        def written(rows: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
            return z[rows, None] * self.lorsa.W_O.detach()[triples.head[rows]]

        def along_w_o(rows: Int[Tensor, " m"]) -> Float[Tensor, "m 1"]:
            return (z[rows] * self._sizes[triples.head[rows]])[:, None]

        place = triples.head, triples.block, triples.query
        return Reading(tokens, *place, parts, z, written, self.n_units, own_axes=along_w_o)


class OriginalHeads:
    """The attention heads of one layer of the model itself."""

    def __init__(self, model: Model, layer: int, shared: SharedRun | None = None):
        self.layer = layer
        self.sites = [f"{name}.{layer}" for name in ("pattern", "v", "z")]
        self.shared = shared or SharedRun(model)
        self.shared.sites |= set(self.sites)
        self.W_O = model.weights(layer).W_O.detach()
        self._gram = self.W_O @ self.W_O.mT  # |v W_O|² = v (W_O W_Oᵀ) v without the long vector
        values, axes = torch.linalg.eigh(self._gram.double())
        self._to_axes = (axes * values.clamp_min(0).sqrt()[:, None]).to(self.W_O.dtype)

    @property
    def n_units(self) -> int:
        """Query heads of the layer."""
        return len(self.W_O)

    @property
    def names(self) -> list[str]:
        """Unit ids."""
        return [f"head.{self.layer}.{head}" for head in range(self.n_units)]

    @property
    def rows_per_token(self) -> int:
        """All heads are active at every token."""
        return self.n_units

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "b t"]) -> Reading:
        """One forward up to the layer; every head at every query."""
        pattern, values, mixed = self.sites
        run = self.shared.read(tokens, self.sites)
        v, z = run[values], run[mixed].transpose(1, 2)  # [b, g, t, dv], [b, h, t, dv]
        _refuse_non_finite(mixed, z)
        moved = self._length(v.repeat_interleave(self.n_units // v.shape[1], 1))
        parts = (run[pattern] * moved[:, :, None])[:, :, FIRST:]
        b, h, q, t = parts.shape
        block, unit, query = torch.cartesian_prod(*(torch.arange(n, device=z.device) for n in (b, h, q))).unbind(1)
        query = query + FIRST
        activation = self._length(z)[:, :, FIRST:].reshape(-1)

        def through(
            weights: Float[Tensor, "h dv d"],
        ) -> Callable[[Int[Tensor, " m"]], Float[Tensor, "m d"]]:
            def product(rows: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
                out = z.new_empty(len(rows), weights.shape[-1])
                for head in unit[rows].unique().tolist():  # one product per head: no copy of its weights per row
                    here = (unit[rows] == head).nonzero()[:, 0]
                    out[here] = z[block[rows[here]], head, query[rows[here]]] @ weights[head].to(z.dtype)
                return out

            return product

        written, along_axes = through(self.W_O), through(self._to_axes)
        return Reading(tokens, unit, block, query, parts.reshape(-1, t), activation, written, h, own_axes=along_axes)

    def _length(self, vectors: Float[Tensor, "b h t dv"]) -> Float[Tensor, "b h t"]:
        """|vector W_O| of each head."""
        return ((vectors @ self._gram.to(vectors.dtype)) * vectors).sum(-1).clamp_min(0).sqrt()


def _refuse_non_finite(site: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise NonFiniteError(f"{site} is not finite on this text; load the model in float32")
