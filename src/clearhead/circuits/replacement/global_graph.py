"""The circuit of a whole model whose layers dictionaries replace, once for all prompts: weights times co-activity.

With every attention layer replaced by a Lorsa (MLPs by transcoders), all that moves through the stream is a_u w_u:
units u with activations and fixed write vectors. What u gives to what reads behind it is then a weight that knows no
data, times how often and how strongly both act together. With s the scale of the norm that is read through, frozen at
each token, and ⟨·⟩ the mean over tokens i:

    u → feature f     (w_u · w_enc[f])  ⟨ f active_i · s_i a_u,i ⟩
    u → Lorsa head n  (w_u · w_v[n])    ⟨ n active_i · Σ_j A_ij s_j a_u,j ⟩    to its pre-activation, by its pattern
    u → logit v       (w_u · (W_U[:, v] − mean))  ⟨ v is next_i · s_i a_u,i ⟩
    u → keys of p     ⟨ p active_i · Σ_j (A_ij − 1/visible_i) q_i · (W_K w_u s_j a_u,j) ⟩ scale     to the score at the
                      keys that pattern p looks at, less that at the keys it could look at; p is active where one of its
                      heads is
    u → queries of p  the same with k_j and W_Q w_u s_i a_u,i
    keys, queries of p → head n    ⟨ n active_i · Σ_j (A_ij − 1/visible_i) v_n,j ⟩        what looking there and not
                      everywhere moves; the same number from both, which need one another

Edges that never act have no weight. Those kept matter most for the logits: influence starts as each logit's share of
Σ|weight| into logits and is handed down, every unit's in proportion to the |weight| of what enters it, so what leads
nowhere is left out however large it is. Pattern p of layer L is `head_k.L.p` and `head_q.L.p`; `input` is
all position embeddings together. Activations, patterns and scales are those of the replaced model. Constants (biases)
are not drawn, nor is what position 0 writes, which keeps the model's own output; MLPs without a transcoder stay the
model's own and are not drawn either.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.norms import Norm
from clearhead.model.rope import rotate
from clearhead.model.run import Edit, Run
from clearhead.runs import environment, progress
from clearhead.spectral.writes import Parts
from clearhead.units import Graph, Provenance, Unit

MOST_PAIRS = 2**27
"""Pairs of units that are held at once; a model with more is no toy."""
PROTOCOL = (
    "global circuit of the replaced model: weight = virtual weight times mean co-activation; edges into keys and "
    "queries are in units of the score, all others in those of what they enter"
)


@dataclass(eq=False)
class _Writers:
    """Units of one kind and depth: fixed write vectors, and how active they are at the tokens of the present block."""

    units: list[Unit]
    depth: int
    write: Float[Tensor, "m d"]
    activity: Float[Tensor, "t m"]
    total: Float[Tensor, " m"]
    """Σ activity over all tokens."""
    count: Float[Tensor, " m"]
    """Tokens at which it is not 0."""


def trace_global(
    model: Model, dictionaries: Dictionaries, tokens: Int[Tensor, "b t"], *, edges: int = 600, text: str = ""
) -> Graph:
    """The `edges` edges of the replaced model that matter most, over blocks of tokens; the graph holds them in order.

    Raises `ClearheadError` where an attention layer has no Lorsa, for norms behind modules and query-key norms, through
    which no weight is fixed, and for models with too many units.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 3 or not len(tokens):
        raise ClearheadError(f"expected blocks of at least 3 tokens, [b, t]; got {list(tokens.shape)}")
    tracer = _Tracer(model, dictionaries)
    with progress("circuit", tokens.numel()) as advance, torch.no_grad():
        for block in tokens:
            tracer.add(block.to(model.device))
            advance(block.numel())
    return tracer.graph(edges, text)


class _Tracer:
    """Sums of co-activity over blocks."""

    def __init__(self, model: Model, dictionaries: Dictionaries):
        self.model, self.dictionaries = model, dictionaries
        self.parts = Parts(model)
        self._check()
        self.count = 0
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
        units = self.model.d_vocab + sum(one.n_units for one in self._all())
        if units * max(self.model.d_vocab, *(one.n_units for one in self._all())) > MOST_PAIRS:
            raise ClearheadError(f"{units:,} units are too many for the circuit of a whole model; give smaller ones")

    def _all(self):
        return [*self.dictionaries.attention.values(), *self.dictionaries.mlp.values()]

    def add(self, tokens: Int[Tensor, " t"]) -> None:
        """One block."""
        run = self._run(tokens)
        self.count += len(tokens) - 1
        self._write(run, tokens)
        for layer in range(self.model.n_layers):
            self._into_lorsa(run, layer)
            if layer in self.dictionaries.mlp:
                self._into_features(run, layer)
        read, scaled = self._reads(run, 2 * self.model.n_layers)
        following = F.one_hot(tokens[1:], self.model.d_vocab).to(scaled)
        following[0] = 0  # as everywhere, the prediction at position 0 is not counted
        self._add("logit", self.model.n_layers, scaled[:-1].T @ following)

    def _run(self, tokens: Int[Tensor, " t"]) -> Run:
        """The replaced model's forward."""
        edit: dict[str, Edit] = {}
        for layer, lorsa in self.dictionaries.attention.items():
            edit[f"attn_out.{layer}"] = _instead(f"attn_in.{layer}", lambda x, one=lorsa: one(x).y)
        for layer, one in self.dictionaries.mlp.items():
            edit[f"mlp_out.{layer}"] = _instead(f"mlp_in.{layer}", lambda x, one=one: one(x).y)
        names = ["attn_in", "resid_pre", "mlp_in"] + ([] if self.model.family.parallel else ["resid_mid"])
        last = f"resid_post.{self.model.n_layers - 1}"
        return self.model.run(tokens[None], read=["embed", last, *(f"{name}.*" for name in names)], edit=edit)

    def _write(self, run: Run, tokens: Int[Tensor, " t"]) -> None:
        """Sets how active every unit is in this block."""
        dtype, embedded = self.parts.dtype, run["embed"][0]
        table = self.model.places.embedding.get_parameter("weight").detach()
        rest = (run["resid_pre.0"] - run["embed"])[0].to(dtype)
        if not torch.allclose(table[tokens].to(embedded), embedded):
            raise ClearheadError(f"the embeddings of {self.model.name} are not rows of its table; nothing can be drawn")
        active = [F.one_hot(tokens, self.model.d_vocab).to(dtype), torch.eye(len(tokens)).to(rest)]
        codes = {}
        for layer, lorsa in self.dictionaries.attention.items():
            codes[2 * layer + 1] = (lorsa, lorsa.encode(run[f"attn_in.{layer}"]))
        for layer, one in self.dictionaries.mlp.items():
            codes[2 * layer + 2] = (one, one.encode(run[f"mlp_in.{layer}"]))
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
            writers.total += activity.sum(0)
            writers.count += (activity != 0).sum(0)

    def _writers(self, table: Tensor, positions: Tensor, placed: dict[int, Any]) -> Iterator[_Writers]:
        """Everything that writes, in the order of depth."""

        def writers(units: list[Unit], depth: int, write: Tensor) -> _Writers:
            return _Writers(units, depth, write, write[:0], write.new_zeros(len(write)), write.new_zeros(len(write)))

        yield writers([Unit("embedding", index=v) for v in range(len(table))], 0, table)
        yield writers([Unit("input")] * len(positions), 0, positions)
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
        active = self._present(Unit("feature", layer, 0)) != 0
        self._add("feature", layer, scaled.T @ active.to(scaled))

    def _into_lorsa(self, run: Run, layer: int) -> None:
        lorsa, x = self.dictionaries.attention[layer], run[f"attn_in.{layer}"]
        _, scaled = self._reads(run, 2 * layer)
        active = (self._present(Unit("lorsa", layer, 0)) != 0).to(scaled)
        pattern, size = lorsa.patterns(x)[0].to(scaled), lorsa.config.pattern_size
        t = len(scaled)
        visible = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if lorsa.config.window is not None:
            visible = visible.triu(1 - lorsa.config.window)
        spread = pattern - visible.to(pattern) / visible.sum(1, keepdim=True)
        values = lorsa.values(x)[0].to(scaled)
        by_pattern = active.unflatten(1, (-1, size)).unbind(1)
        met = [(pattern[p] @ scaled).T @ on for p, on in enumerate(by_pattern)]
        self._add("lorsa", layer, torch.cat(met, 1))
        looking = [(on * (spread[p] @ values[:, p * size : (p + 1) * size])).sum(0) for p, on in enumerate(by_pattern)]
        self._add("looking", layer, torch.cat(looking))
        weighed = spread * torch.stack([on.any(1) for on in by_pattern])[..., None].to(spread)
        q, k = (side[0].to(scaled) for side in lorsa.queries_keys(x))
        keys = _unrotated(lorsa, weighed.mT @ q)
        queries = _unrotated(lorsa, weighed @ k) * lorsa.gates()[:, None].to(scaled)
        self._add("head_k", layer, scaled.T @ keys)
        self._add("head_q", layer, scaled.T @ queries)

    def _present(self, unit: Unit) -> Float[Tensor, "t m"]:
        return next(one.activity for one in self.writers if one.units[0] == unit)

    def _add(self, kind: str, layer: int, met: Tensor) -> None:
        self.met[kind, layer] = self.met.get((kind, layer), 0) + met

    def graph(self, edges: int, text: str) -> Graph:
        """The edges that matter most for the logits, and the units that they join."""
        units = [unit for one in self.writers for unit in dict.fromkeys(one.units)]
        influence = torch.zeros(len(units), dtype=self.parts.dtype, device=self.model.device)
        kept: list[tuple[float, Unit, Unit, float]] = []

        def share(kind: str, layer: int, target: Tensor | None, beside: Tensor | float = 0.0) -> Tensor:
            """Hands the influence of targets on to what enters them; returns what enters each, Σ|weight|."""
            weight = self._weights(kind, layer)
            size = weight.abs()
            entering = size.sum(0) + beside
            if target is None:
                target = entering / entering.sum().clamp_min(torch.finfo(size.dtype).tiny)
            scores = size * (target / torch.where(entering > 0, entering, 1))
            influence[: len(scores)] += scores.sum(1)
            place = None if kind == "logit" else layer
            values, at = scores.flatten().topk(min(edges, scores.numel()))
            for value, where in zip(values.tolist(), at.tolist(), strict=True):
                row, column = divmod(where, weight.shape[1])
                if value > 0:
                    kept.append((value, units[row], Unit(kind, place, column), float(weight[row, column])))
            return entering

        share("logit", self.model.n_layers, None)
        first = {one.units[0]: len(dict.fromkeys(u for w in self.writers[:n] for u in w.units))
                 for n, one in enumerate(self.writers)}  # fmt: skip
        for layer in reversed(range(self.model.n_layers)):
            if layer in self.dictionaries.mlp:
                start = first[Unit("feature", layer, 0)]
                share("feature", layer, influence[start : start + self.dictionaries.mlp[layer].n_units].clone())
            lorsa, start = self.dictionaries.attention[layer], first[Unit("lorsa", layer, 0)]
            heads = influence[start : start + lorsa.n_heads].clone()
            looking = self.met["looking", layer] / self.count
            entering = share("lorsa", layer, heads, 2 * looking.abs())
            part = heads * looking.abs() / torch.where(entering > 0, entering, 1)
            for kind in ("head_k", "head_q"):
                share(kind, layer, part.unflatten(0, (-1, lorsa.config.pattern_size)).sum(1))
                for head in part.topk(min(edges, len(part))).indices.tolist():
                    if part[head] > 0:
                        pattern = Unit(kind, layer, int(lorsa.pattern_of(head)))
                        kept.append((float(part[head]), pattern, units[start + head], float(looking[head])))
        kept.sort(key=lambda edge: -edge[0])
        return self._graph(kept[:edges], units, influence, text)

    def _weights(self, kind: str, layer: int) -> Float[Tensor, "u m"]:
        """All edges of one kind into one layer, from what writes below; position embeddings are one row."""
        depth = 2 * layer + (kind == "feature")
        weight = self._virtual(kind, layer, self._writes(depth), self.met[kind, layer] / self.count)
        embeddings, positions = (len(one.units) for one in self.writers[:2])
        parts = weight.split([embeddings, positions, len(weight) - embeddings - positions])
        return torch.cat([parts[0], parts[1].sum(0, keepdim=True), parts[2]])

    def _graph(
        self, edges: list[tuple[float, Unit, Unit, float]], written: list[Unit], influence: Tensor, text: str
    ) -> Graph:
        order = {unit: place for place, unit in enumerate(written)}
        units = sorted(
            {u for edge in edges for u in edge[1:3]}, key=lambda u: (_height(u), order.get(u, 0), u.index or 0)
        )
        place = {unit: number for number, unit in enumerate(units)}
        rate = {u: float(c) / self.count for one in self.writers for u, c in zip(one.units, one.count, strict=True)}
        through = np.zeros(len(units))
        for value, source, target, _ in edges:
            through[place[source]] += value
            through[place[target]] += value * (target.kind == "logit")
        for unit in written:
            if unit in place:
                through[place[unit]] = float(influence[order[unit]])
        down = np.argsort(-through, kind="stable")
        cumulative = np.empty(len(units))
        cumulative[down] = through[down].cumsum() / max(through.sum(), np.finfo(float).tiny)
        return Graph(
            units,
            [place[source] for _, source, _, _ in edges],
            [place[target] for _, _, target, _ in edges],
            [weight for *_, weight in edges],
            Provenance(self.model.name, PROTOCOL, prompt=text, versions=environment()["versions"]),
            values={
                "influence": cumulative,
                "rate": [np.nan if unit.kind == "input" else rate.get(unit, np.nan) for unit in units],
            },
            labels=self._labels(units),
        )

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

    def _labels(self, units: list[Unit]) -> dict[str, str]:
        words = {"head_k": "keys of pattern", "head_q": "queries of pattern"}
        labels = {unit.id: f"{words[unit.kind]} {unit.index}" for unit in units if unit.kind in words}
        tokens = [unit for unit in units if unit.kind in ("embedding", "logit")]
        if self.model.tokenizer is not None:
            strings = self.model.token_strings([unit.index or 0 for unit in tokens])
            labels |= {unit.id: string for unit, string in zip(tokens, strings, strict=True)}
        return labels | {unit.id: "positions" for unit in units if unit.kind == "input"}


def _height(unit: Unit) -> int:
    """From bottom to top; queries and keys stand below the heads that they serve."""
    if unit.layer is None:
        return 10**9 if unit.kind == "logit" else -1
    return 3 * unit.layer + {"head_k": 0, "head_q": 0, "lorsa": 1, "feature": 2}[unit.kind]


def _instead(site: str, imitate: Any) -> Edit:
    """A module's output replaced by what a dictionary says, but for position 0."""

    def write(y: Tensor, run: Run) -> Tensor:
        return torch.cat([y[:, :1], imitate(run[site])[:, 1:].to(y)], 1)

    return write


def _unrotated(lorsa: Lorsa, vectors: Float[Tensor, "p t dh"]) -> Float[Tensor, "p t dh"]:
    """Queries or keys of each position turned back, as they are before the rotation."""
    if lorsa.rope is None:
        return vectors
    cos, sin = lorsa.rope.tables(torch.arange(vectors.shape[1], device=vectors.device), dtype=vectors.dtype)
    return rotate(vectors[None], cos, -sin, lorsa.rope)[0]
