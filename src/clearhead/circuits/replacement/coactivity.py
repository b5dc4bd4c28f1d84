"""Co-activity: how often and how strongly the units of a replaced model act together, and the edges that follow.

With every attention layer replaced by a Lorsa (MLPs by transcoders), all that moves through the stream is a_u w_u:
units u with activations and fixed write vectors. What u gives to what reads behind it is then a weight that knows no
data, times how often and how strongly both act together. With s the scale of the norm that is read through, frozen at
each token, ⟨·⟩ the mean over tokens i, and Δx_i = x_i − ⟨x⟩:

    u → feature f     (w_u · w_enc[f])  ⟨ f active_i · Δ s_i a_u,i ⟩
    u → Lorsa head n  (w_u · w_v[n])    ⟨ n active_i · Δ Σ_j A_ij s_j a_u,j ⟩  to its pre-activation, by its pattern
    u → logit v       (w_u · (W_U[:, v] − mean))  ⟨ v is next_i · Δ s_i a_u,i ⟩
    u → keys of p     ⟨ p active_i · Σ_j (A_ij − 1/visible_i) q_i · (W_K w_u s_j a_u,j) ⟩ scale     to the score at the
                      keys that pattern p looks at, less that at the keys it could look at; p is active where one of its
                      heads is
    u → queries of p  the same with k_j and W_Q w_u s_i a_u,i
    keys, queries of p → head n    ⟨ n active_i · Σ_j (A_ij − 1/visible_i) v_n,j ⟩        what looking there and not
                      everywhere moves; the same number from both, which need one another

All are contrasts: what a unit gives everywhere tells nothing apart, and neither do biases, which cancel (with a sink, 1
is what rests on keys). Activations, patterns and scales are those of the replaced model. What position 0 writes is no
unit: it keeps the model's own output; MLPs without a transcoder stay the model's own. Pattern p of layer L is
`head_k.L.p` and `head_q.L.p`; `positions` is all position embeddings together. Counted besides, by pattern and over the
queries at which it is active: which share of its attention rests on which `KEYS`.

Not here: which edges are drawn (strongest.py), and sums of them over a pattern's heads (by_pattern.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.edits import in_place
from clearhead.circuits.replacement.incoming import Incoming
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.norms import Norm
from clearhead.model.rope import rotate
from clearhead.model.run import Run
from clearhead.model.self_test import TOLERANCE
from clearhead.spectral.writes import Parts
from clearhead.units import Unit

MOST_PAIRS = 2**27
"""Pairs of units that are held at once; a model with more is no toy."""
KEYS = ("first token", "itself", "token before", "same token earlier", "after same token")
"""Kinds of keys, of which one counts as the first that it is; others are elsewhere."""


@dataclass(eq=False)
class _Writers:
    """Units of one kind and depth: fixed write vectors, and how active they are at the tokens of the present block."""

    units: list[Unit]
    depth: int
    write: Float[Tensor, "m d"]
    activity: Float[Tensor, "t m"]
    count: Float[Tensor, " m"]
    """Tokens at which it is not 0, position 0 left out."""


class CoActivity:
    """Sums of co-activity over blocks of tokens.

    Raises `ClearheadError` where an attention layer has no Lorsa, for norms behind modules and query-key norms, through
    which no weight is fixed, for transcoders with a skip connection, and for models with too many units or with
    embeddings that are no sum of tokens and positions.
    """

    def __init__(self, model: Model, dictionaries: Dictionaries):
        self.model, self.dictionaries = model, dictionaries
        self.parts = Parts(model)
        self._check()
        self.count = self.predictions = 0
        self.writers: list[_Writers] = []
        self.met: dict[tuple[str, int], Tensor] = {}

    def _check(self) -> None:
        missing = sorted(set(range(self.model.n_layers)) - set(self.dictionaries.attention))
        if missing:
            raise ClearheadError(f"attention of layers {missing} has no Lorsa; give one for every layer of the model")
        if self.dictionaries.clt is not None:
            raise ClearheadError("the circuit of a model is drawn from transcoders of single layers, not across them")
        for layer, parts in enumerate(self.parts.layers):
            if parts.behind_attention is not None or parts.behind_mlp is not None:
                raise ClearheadError(f"layer {layer} of {self.model.name} has a norm behind a module: no fixed weights")
            if self.dictionaries.attention[layer].config.qk_norm:
                raise ClearheadError(f"the Lorsa of layer {layer} has a query-key norm: no weight through it is fixed")
        skipping = sorted(layer for layer, one in self.dictionaries.mlp.items() if one.config.skip)
        if skipping:
            raise ClearheadError(f"transcoders of layers {skipping} write past their features (--skip); train others")
        units = self.model.d_vocab + sum(one.n_units for one in self._all())
        if units * max(self.model.d_vocab, *(one.n_units for one in self._all())) > MOST_PAIRS:
            raise ClearheadError(f"{units:,} units are too many for the circuit of a whole model; give smaller ones")

    def _all(self):
        return [*self.dictionaries.attention.values(), *self.dictionaries.mlp.values()]

    @torch.no_grad()
    def add(self, tokens: Int[Tensor, " t"]) -> None:
        """One block."""
        run = self._run(tokens)
        self.count += len(tokens) - 1
        self.predictions += len(tokens) - 2
        self._write(run, tokens)
        for layer in range(self.model.n_layers):
            self._into_lorsa(run, layer, tokens)
            if layer in self.dictionaries.mlp:
                self._into_features(run, layer)
        _, scaled = self._reads(run, 2 * self.model.n_layers)
        following = F.one_hot(tokens[1:], self.model.d_vocab).to(scaled)
        following[0] = 0  # as everywhere, the prediction at position 0 is not counted
        self._meet("logit", self.model.n_layers, scaled[:-1], following)

    def _run(self, tokens: Int[Tensor, " t"]) -> Run:
        """The replaced model's forward."""
        names = ["attn_in", "resid_pre", "mlp_in"] + ([] if self.model.family.parallel else ["resid_mid"])
        last = f"resid_post.{self.model.n_layers - 1}"
        return self.model.run(
            tokens[None], read=["embed", last, *(f"{name}.*" for name in names)], edit=in_place(self.dictionaries)
        )

    def _write(self, run: Run, tokens: Int[Tensor, " t"]) -> None:
        """Sets how active every unit is in this block."""
        dtype, embedded = self.parts.dtype, run["embed"][0]
        table = self.model.places.embedding.get_parameter("weight").detach()
        first = run["resid_pre.0"][0].to(dtype)
        rest = first - embedded.to(dtype)
        rounding = TOLERANCE[self.model.dtype] * first.abs().max()
        known = self.writers[1].write if self.writers else rest
        if not torch.allclose(table[tokens].to(embedded), embedded) or (rest - known).abs().max() > rounding:
            raise ClearheadError(
                f"the stream of {self.model.name} does not begin with rows of its table of embeddings and one vector "
                "for each position; nothing can be drawn"
            )
        active = [F.one_hot(tokens, self.model.d_vocab).to(dtype), torch.eye(len(tokens)).to(rest)]
        codes = {}
        for layer, lorsa in self.dictionaries.attention.items():
            codes[2 * layer + 1] = (lorsa, lorsa.encode(run[f"attn_in.{layer}"].to(dtype)))
        for layer, one in self.dictionaries.mlp.items():
            codes[2 * layer + 2] = (one, one.encode(run[f"mlp_in.{layer}"].to(dtype)))
        for depth in sorted(codes):
            one, (values, which) = codes[depth]
            dense = torch.zeros(len(tokens), one.n_units, dtype=dtype, device=rest.device)
            dense.scatter_add_(1, which[0], values[0].to(dtype))
            dense[0] = 0
            active.append(dense)
        if not self.writers:
            self.writers = list(self._writers(table.to(dtype), rest, {depth: one for depth, (one, _) in codes.items()}))
        for writers, activity in zip(self.writers, active, strict=True):
            writers.activity = activity
            writers.count += (activity[1:] != 0).sum(0)

    def _writers(self, table: Tensor, positions: Tensor, placed: dict[int, Any]) -> Iterator[_Writers]:
        """Everything that writes, in the order of depth."""

        def writers(units: list[Unit], depth: int, write: Tensor) -> _Writers:
            return _Writers(units, depth, write, write[:0], write.new_zeros(len(write)))

        yield writers([Unit("embedding", index=v) for v in range(len(table))], 0, table)
        yield writers([Unit("positions")] * len(positions), 0, positions)
        for depth in sorted(placed):
            one, layer = placed[depth], (depth - 1) // 2
            kind, write = ("lorsa", one.W_O) if isinstance(one, Lorsa) else ("feature", one.W_dec)
            units = [Unit(kind, layer, index) for index in range(one.n_units)]
            yield writers(units, depth, write.detach().to(table) * self.parts.multiplier)

    def _sources(self, depth: int) -> list[_Writers]:
        """What writes below a depth; in parallel blocks the MLP reads what attention reads."""
        if self.model.family.parallel:
            depth -= depth % 2
        return [one for one in self.writers if one.depth <= depth]

    def _norm(self, depth: int) -> Norm | None:
        layer, second = divmod(depth, 2)
        if layer == self.model.n_layers:
            return self.parts.final_norm.plain()
        parts = self.parts.layers[layer]
        return parts.mlp_norm if second else parts.norm

    def _writes(self, depth: int) -> Float[Tensor, "u d"]:
        """Write vectors below a depth as they are read through the norm there, but for its scale."""
        write, norm = torch.cat([one.write for one in self._sources(depth)]), self._norm(depth)
        if norm is None:
            return write
        write = norm.centre(write)
        return write if norm.gain is None else write * norm.gain.detach().to(write)

    def _reads(self, run: Run, depth: int) -> tuple[Float[Tensor, "t 1"] | None, Float[Tensor, "t u"]]:
        """The scale of the norm at a depth, and the activity of everything below times it."""
        layer, second = divmod(depth, 2)
        name = f"resid_mid.{layer}" if second and not self.model.family.parallel else f"resid_pre.{layer}"
        name = f"resid_post.{layer - 1}" if layer == self.model.n_layers else name
        activity, norm = torch.cat([one.activity for one in self._sources(depth)], 1), self._norm(depth)
        if norm is None:
            return None, activity
        scale = norm.frozen_scale(run[name][0].to(activity))
        return scale, activity * scale

    def _into_features(self, run: Run, layer: int) -> None:
        _, scaled = self._reads(run, 2 * layer + 1)
        active = self._of("feature", layer).activity != 0
        self._meet("feature", layer, scaled, active.to(scaled))

    def _into_lorsa(self, run: Run, layer: int, tokens: Tensor) -> None:
        lorsa, x = self.dictionaries.attention[layer], run[f"attn_in.{layer}"].to(self.parts.dtype)
        _, scaled = self._reads(run, 2 * layer)
        active = (self._of("lorsa", layer).activity != 0).to(scaled)
        pattern, size = lorsa.patterns(x)[0].to(scaled), lorsa.config.pattern_size
        t = len(scaled)
        visible = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if lorsa.config.window is not None:
            visible = visible.triu(1 - lorsa.config.window)
        evenly = visible.to(pattern) / visible.sum(1, keepdim=True)
        spread = pattern - evenly * pattern.sum(-1, keepdim=True)  # of 1 but with a sink
        values = lorsa.values(x)[0].to(scaled)
        by_pattern = active.unflatten(1, (-1, size)).unbind(1)
        for p, on in enumerate(by_pattern):
            self._meet(f"lorsa {p}", layer, pattern[p] @ scaled, on)
        looking = [(on * (spread[p] @ values[:, p * size : (p + 1) * size])).sum(0) for p, on in enumerate(by_pattern)]
        self._add("looking", layer, torch.cat(looking))
        active_at = torch.stack([on.any(1) for on in by_pattern])[..., None].to(spread)
        self._add("keys", layer, torch.stack([((pattern * active_at) * on).sum((1, 2)) for on in _kinds(tokens)], 1))
        weighed = spread * active_at
        q, k = (side[0].to(scaled) for side in lorsa.queries_keys(x))
        keys = _unrotated(lorsa, weighed.mT @ q)
        queries = _unrotated(lorsa, weighed @ k) * lorsa.gates()[:, None].to(scaled)
        self._add("head_k", layer, scaled.T @ keys)
        self._add("head_q", layer, scaled.T @ queries)

    def _meet(self, kind: str, layer: int, given: Float[Tensor, "t u"], on: Float[Tensor, "t m"]) -> None:
        """What is given where something is active, and the means of both, position 0 left out."""
        for name, value in (("", given.T @ on), ("given ", given[1:].sum(0)), ("on ", on.sum(0))):
            self._add(name + kind, layer, value)

    def _add(self, kind: str, layer: int, met: Tensor) -> None:
        self.met[kind, layer] = self.met.get((kind, layer), 0) + met

    def incoming(self) -> Iterator[Incoming]:
        """All edges, by kind and layer of what they enter, from the logits down."""
        last = self.model.n_layers
        logits = [Unit("logit", index=v) for v in range(self.model.d_vocab)]
        yield Incoming(self._units(2 * last), logits, self._weights("logit", last))
        for layer in reversed(range(last)):
            if layer in self.dictionaries.mlp:
                yield self.into_features(layer)
            heads, config = self._of("lorsa", layer).units, self.dictionaries.attention[layer].config
            sides = [[Unit(side, layer, p) for p in range(config.n_patterns)] for side in ("head_k", "head_q")]
            below, values = self._units(2 * layer), self._weights("lorsa", layer)
            own = torch.eye(config.n_patterns).to(values).repeat_interleave(config.pattern_size, 1)
            looking = own * (self.met["looking", layer] / self.count)
            yield Incoming([*below, *sides[0], *sides[1]], heads, torch.cat([values, looking, looking]))
            for side in sides:
                yield Incoming(below, side, self._weights(side[0].kind, layer))

    def into_features(self, layer: int) -> Incoming:
        """All edges into the features of one layer."""
        return Incoming(self._units(2 * layer + 1), self._of("feature", layer).units, self._weights("feature", layer))

    def rates(self) -> dict[Unit, float]:
        """The share of tokens at which a unit is active; of `positions` none."""
        rows = ((unit, float(count)) for one in self.writers for unit, count in zip(one.units, one.count, strict=True))
        return {unit: count / self.count for unit, count in rows if unit.kind != "positions"}

    def attention(self) -> dict[Unit, dict[str, float]]:
        """By pattern (`head_k.L.p`), the share of its attention on every kind of key; of one never active none."""
        found = {}
        for layer in range(self.model.n_layers):
            for p, row in enumerate(self.met["keys", layer].tolist()):
                if sum(row):
                    found[Unit("head_k", layer, p)] = {kind: x / sum(row) for kind, x in zip(KEYS, row, strict=False)}
        return found

    def _units(self, depth: int) -> list[Unit]:
        """What writes below a depth, each unit once."""
        return list(dict.fromkeys(unit for one in self._sources(depth) for unit in one.units))

    def _of(self, kind: str, layer: int) -> "_Writers":
        return next(one for one in self.writers if one.units[0] == Unit(kind, layer, 0))

    def _weights(self, kind: str, layer: int) -> Float[Tensor, "u m"]:
        """All edges of one kind into one layer, from what writes below; position embeddings are one row."""
        depth = 2 * layer + (kind == "feature")
        weight = self._virtual(kind, layer, self._writes(depth), self._mean_met(kind, layer))
        embeddings, positions = (len(one.units) for one in self.writers[:2])
        parts = weight.split([embeddings, positions, len(weight) - embeddings - positions])
        return torch.cat([parts[0], parts[1].sum(0, keepdim=True), parts[2]])

    def _mean_met(self, kind: str, layer: int) -> Tensor:
        """The means over tokens that weights are multiplied by, as contrasts."""
        if kind in ("head_k", "head_q"):
            return self.met[kind, layer] / self.count
        if kind == "lorsa":
            patterns = range(self.dictionaries.attention[layer].config.n_patterns)
            return torch.cat([self._mean_met(f"lorsa {p}", layer) for p in patterns], 1)
        n = self.predictions if kind == "logit" else self.count
        met, given, on = (self.met[name + kind, layer] for name in ("", "given ", "on "))
        return (met - torch.outer(given, on) / n) / n

    def _virtual(self, kind: str, layer: int, write: Float[Tensor, "u d"], met: Tensor) -> Float[Tensor, "u m"]:
        """Virtual weights times co-activity."""
        if kind == "logit":
            W_U = self.parts.unembedding[0].detach().to(write)
            return met * (write @ (W_U - W_U.mean(1, keepdim=True)))
        if kind == "feature":
            return met * (write @ self.dictionaries.mlp[layer].W_enc.detach().to(write).T)
        lorsa = self.dictionaries.attention[layer]
        if kind == "lorsa":
            return met * (write @ lorsa.W_V.detach().to(write).T)
        W = lorsa.W_K if kind == "head_k" else lorsa.W_Q
        W = W.detach().to(write).repeat_interleave(lorsa.config.patterns_per_group, 0)
        return torch.stack([(write @ W[p].T * one).sum(1) for p, one in enumerate(met)], 1) * lorsa.config.scale


def _kinds(tokens: Int[Tensor, " t"]) -> Float[Tensor, "kinds t t"]:
    """By kind of key (`KEYS`, and elsewhere), query and key: whether the key is of it."""
    t = len(tokens)
    place, same = torch.arange(t, device=tokens.device), tokens[:, None] == tokens
    back = place[:, None] - place
    behind = torch.zeros_like(same)
    behind[:, 1:] = same[:, :-1]
    told = torch.stack([(place == 0).expand(t, t), back == 0, back == 1, same & (back > 0), behind & (back > 0)])
    first = told & (told.cumsum(0) == 1)
    return torch.cat([first, ~told.any(0, keepdim=True)]).float()


def _unrotated(lorsa: Lorsa, vectors: Float[Tensor, "p t dh"]) -> Float[Tensor, "p t dh"]:
    """Queries or keys of each position turned back, as they are before the rotation."""
    if lorsa.rope is None:
        return vectors
    cos, sin = lorsa.rope.tables(torch.arange(vectors.shape[1], device=vectors.device), dtype=vectors.dtype)
    return rotate(vectors[None], cos, -sin, lorsa.rope)[0]
