"""How a Lorsa starts: from noise, from the original heads, or as the reference implementation documents it.

Everything happens on the scaled problem (f_in x -> f_out y) that training sees (`training.dictionary_task`).
All but `random` start with the original queries and keys, biases and norm gains included, repeated for every group that
an original head hosts; they differ in the values:

    random     nothing of the model
    original   random orthogonal bases of each head's value space, both signs
    data       independent components of each head's outputs on a sample
    reference  the per-head active subspace of the reference implementation (no query-key biases)

`from_attention` gives the exact copy: as many Lorsa heads as the layer has value dimensions, all kept.
"""

import copy
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.dictionaries.narrow import singular_factors
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.model.geometry import AttentionGeometry
from clearhead.model.weights import AttentionWeights
from clearhead.ops.ica import independent_components
from clearhead.ops.lorsa import visible

METHODS = ("data", "original", "random", "reference")
SINK_SHARE = 1e-3
"""Share of the attention that an added sink starts with: nothing for the pattern, something for its gradient."""
NO_SINK = -1e4
"""A logit that takes no attention in any number format."""
ICA_ITERATIONS = 30
"""Enough for directions to start from; training turns them further."""


class Sample(NamedTuple):
    """Activations of one layer on a few blocks, as the model computes them."""

    x: Float[Tensor, "b t d"]
    y: Float[Tensor, "b t d"]
    z: Float[Tensor, "b t h dv"]


@torch.no_grad()
def draw_sample(model: Model, layer: int, tokens: Int[Tensor, "b t"], batch_blocks: int = 8) -> Sample:
    """Run the model up to `layer` on `tokens`; its attention's input, output and mixed values, float32 on the CPU."""
    sites = [f"attn_in.{layer}", f"attn_out.{layer}", f"z.{layer}"]
    parts = [model.run(batch, read=sites) for batch in tokens.split(batch_blocks)]
    return Sample(*(torch.cat([run[site].float().cpu() for run in parts]) for site in sites))


def lorsa_config(
    geometry: AttentionGeometry,
    d_model: int,
    *,
    heads: int,
    groups: int,
    k: int,
    activation: str = "topk",
    patterns_per_group: int = 1,
    sink: bool = False,
) -> LorsaConfig:
    """The configuration of a Lorsa for a layer of that geometry, with a sink where the layer has one or `sink` says.

    Raises `ClearheadError` where the layer's attention has a part that a Lorsa does not have: ALiBi, normed values,
    norms over all heads at once or after the rotation.
    """
    norm = geometry.qk_norm
    reasons = {
        "its scores have an ALiBi slope": geometry.alibi is not None,
        "its values are normalised": geometry.v_norm is not None,
        "its query-key norm runs over all heads at once": norm is not None and norm.whole,
        "its query-key norm comes after the rotation": norm is not None and norm.after_rope,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ClearheadError(f"a Lorsa cannot imitate this layer exactly: {reason}; choose another model")
    return LorsaConfig(
        d_model=d_model,
        n_heads=heads,
        n_groups=groups,
        d_qk=geometry.d_head,
        k=k,
        activation=activation,  # pyright: ignore[reportArgumentType]  # checked by LorsaConfig itself
        patterns_per_group=patterns_per_group,
        scale=geometry.scale * geometry.q_scale,
        rope=geometry.rope.to_dict() if geometry.rope else None,
        qk_norm=norm.kind if norm else None,
        qk_norm_eps=norm.eps if norm else 0.0,
        window=geometry.window,
        softcap=geometry.softcap,
        sinks=geometry.sinks or sink,
    )


@torch.no_grad()
def from_attention(weights: AttentionWeights, geometry: AttentionGeometry) -> Lorsa:
    """The exact copy of a layer: one Lorsa head per value dimension, all kept (signed top-k with k = all)."""
    h, d = weights.W_Q.shape[:2]
    dv = weights.W_V.shape[-1]
    config = lorsa_config(geometry, d, heads=h * dv, groups=h, k=h * dv, activation="signed-topk")
    w = weights.per_head()
    lorsa = Lorsa(config).to(w.W_V)
    copy_queries_keys(lorsa, w, torch.arange(h), 1.0)
    lorsa.W_V.copy_(w.W_V.mT.reshape(h * dv, d))
    lorsa.W_O.copy_(w.W_O.reshape(h * dv, d))
    if w.b_V is not None:
        lorsa.b_V.copy_(w.b_V.reshape(-1))
    if w.b_O is not None:
        lorsa.b_D.copy_(w.b_O)
    lorsa.normalise_decoder()
    return lorsa.eval()


@torch.no_grad()
def copy_queries_keys(lorsa: Lorsa, w: AttentionWeights, host: Tensor, input_scale: float, biases: bool = True) -> None:
    """Give group g the queries, keys, biases, norm gains and sink of original head `host[g]` (`w` is per head)."""
    lorsa.W_Q.copy_(w.W_Q[host].mT / input_scale)
    lorsa.W_K.copy_(w.W_K[host].mT / input_scale)
    if biases and w.b_Q is not None:
        lorsa.b_Q.copy_(w.b_Q[host])
    if biases and w.b_K is not None:
        lorsa.b_K.copy_(w.b_K[host])
    if lorsa.config.qk_norm:
        for own, norm in ((lorsa.q_gain, w.q_norm), (lorsa.k_gain, w.k_norm)):
            if norm is not None and norm.bias is not None:
                raise ClearheadError("a Lorsa cannot imitate this layer exactly: its query-key norm has a bias")
            if norm is None or norm.gain is None:
                own.fill_(1.0)
            else:
                own.copy_(norm.gain.expand(len(w.W_Q), -1)[host])
    if lorsa.config.sinks and w.sinks is not None:
        lorsa.sink.copy_(w.sinks[host].repeat_interleave(lorsa.config.patterns_per_group))


@torch.no_grad()
def with_original_queries_keys(lorsa: Lorsa, weights: AttentionWeights, host: Int[Tensor, " g"] | None = None) -> Lorsa:
    """The copied-QK control: a trained Lorsa whose groups attend as original heads do; values and writes stay.

    `host` names each group's original head, by default the one it started from. Gates become 1, added sinks vanish.
    Raises `ClearheadError` where queries and keys are not as wide as the layer's own.
    """
    w = weights.to(lorsa.W_Q.dtype, lorsa.W_Q.device).per_head()
    if lorsa.config.d_qk != w.W_Q.shape[-1]:
        raise ClearheadError(
            f"this Lorsa's queries are {lorsa.config.d_qk} wide and the layer's own {w.W_Q.shape[-1]}; the control "
            f"needs one trained without --qk-width"
        )
    twin = copy.deepcopy(lorsa)
    twin.b_Q.zero_()
    twin.b_K.zero_()
    if twin.config.sinks:
        twin.sink.fill_(NO_SINK)
    if twin.config.patterns_per_group > 1:
        twin.qk_gate.fill_(1.0)
    copy_queries_keys(twin, w, _hosts_evenly(twin.config.n_groups, len(w.W_Q)) if host is None else host, 1.0)
    return twin


@torch.no_grad()
def turn_to_singular_directions(lorsa: Lorsa) -> None:
    """Rewrite the queries and keys of each group, in place, in the singular directions of their product.

    All scores stay as they are. Only where nothing ties the components: no rotation, no query-key norm.
    """
    sides = ((lorsa.W_Q, lorsa.b_Q), (lorsa.W_K, lorsa.b_K))
    factors = singular_factors(*(torch.cat([W, b[..., None]], -1) for W, b in sides))
    for (W, b), factor in zip(sides, factors, strict=True):
        W.copy_(factor[..., :-1])
        b.copy_(factor[..., -1])


@torch.no_grad()
def start_sinks(lorsa: Lorsa, x: Float[Tensor, "b t d"]) -> None:
    """Let every pattern's sink take the share `SINK_SHARE` of its attention at the median query of a sample.

    sink = median over queries of log sum_j exp(score_ij), plus log(share / (1 - share)).
    """
    c, masses = lorsa.config, []
    for block in x.split(1):
        q, k = lorsa.queries_keys(block)
        scores = q @ k.mT * c.scale
        if c.softcap is not None:
            scores = torch.tanh(scores / c.softcap) * c.softcap
        seen = visible(x.shape[1], x.shape[1], c.window, x.device)
        masses.append(scores.masked_fill(~seen, -torch.inf).logsumexp(-1)[0, :, 1:])
    lorsa.sink.copy_(torch.cat(masses, -1).median(-1).values + math.log(SINK_SHARE / (1 - SINK_SHARE)))


@torch.no_grad()
def initialise(
    lorsa: Lorsa,
    method: str,
    weights: AttentionWeights,
    sample: Sample,
    input_scale: float,
    output_scale: float,
    seed: int,
) -> None:
    """Fill the weights of `lorsa`, in place, for training on (input_scale * x -> output_scale * y).

    Computed in float32 on the CPU, where `lorsa` and `sample` lie, whatever format and place the model has.

    `sample` is what the data-driven parts look at: the outputs' mean, each head's outputs, and the step size of the
    values. Raises `UnknownNameError` for an unknown method and `ClearheadError` when there are fewer query-key groups
    than original heads, since some heads would then be left out.
    """
    if method not in METHODS:
        raise UnknownNameError("initialisation", method, METHODS)
    generator = torch.Generator().manual_seed(seed)
    scales = (input_scale, output_scale)
    w = weights.to(torch.float32, "cpu").per_head()
    if method != "random" and lorsa.config.n_groups < len(w.W_Q):
        raise ClearheadError(
            f"initialisation {method!r} gives every original head at least one query-key group; there are "
            f"{lorsa.config.n_groups} groups for {len(w.W_Q)} heads. Raise --groups, or use --init random"
        )
    fill = {"random": _random, "original": _original, "reference": _reference, "data": _data}[method]
    fill(lorsa, w, sample, scales, generator)
    if lorsa.config.patterns_per_group > 1 and lorsa.rope is None and lorsa.config.qk_norm is None:
        turn_to_singular_directions(lorsa)
    lorsa.normalise_decoder()
    if method != "random":
        _fit_value_scale(lorsa, sample, scales, grid=method == "reference")


def _random(
    lorsa: Lorsa, _: AttentionWeights, sample: Sample, scales: tuple[float, float], generator: Generator
) -> None:
    """Gaussian weights of unit gain, unit decoder rows, the mean output as decoder bias."""
    d = lorsa.config.d_model
    for weight in (lorsa.W_Q, lorsa.W_K, lorsa.W_V, lorsa.W_O):
        weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(d))
    lorsa.b_D.copy_(sample.y[:, 1:].mean((0, 1)) * scales[1])


def _hosts_evenly(n_groups: int, n_heads: int) -> Int[Tensor, " g"]:
    """The original head each group starts from: as even as possible, neighbours together."""
    return torch.arange(n_groups) * n_heads // n_groups


def _original(
    lorsa: Lorsa, w: AttentionWeights, sample: Sample, scales: tuple[float, float], generator: Generator
) -> None:
    """Random rotations of each head's value space, each followed by its negative (activations are positive)."""
    host = _hosts_evenly(lorsa.config.n_groups, len(w.W_Q))
    copy_queries_keys(lorsa, w, host, scales[0])
    size, dv = lorsa.config.group_size, w.W_V.shape[-1]
    for head in range(len(w.W_Q)):
        rows = _rows_of(host, head, size)
        bases: list[Tensor] = []
        while len(bases) * dv < len(rows):
            basis = -bases[-1] if len(bases) % 2 else torch.linalg.qr(torch.randn(dv, dv, generator=generator))[0]
            bases.append(basis)
        mix = torch.cat(bases)[: len(rows)]
        _set_values(lorsa, rows, mix, mix @ w.W_O[head], w, head, scales)
    lorsa.b_D.copy_(sample.y[:, 1:].mean((0, 1)) * scales[1])


def _data(lorsa: Lorsa, w: AttentionWeights, sample: Sample, scales: tuple[float, float], generator: Generator) -> None:
    """Independent components of each head's own outputs: directions along which the outputs are sparse.

    A head's output o = z W_O is decomposed on the sample as o = mean + sum_c s_c a_c with s as independent as possible
    (`independent_components`); a Lorsa head reads s_c from the values and writes a_c. Further copies of a head use
    other halves of the sample, and every second one the negated directions, as activations are positive. The mean goes
    into b_D and, subtracted, into b_V, so no head has to spend its place among the k on it.
    """
    host = _hosts_evenly(lorsa.config.n_groups, len(w.W_Q))
    copy_queries_keys(lorsa, w, host, scales[0])
    lorsa.b_D.copy_((w.b_O if w.b_O is not None else torch.zeros_like(lorsa.b_D)) * scales[1])
    for head in range(len(w.W_Q)):
        rows = _rows_of(host, head, lorsa.config.group_size)
        z = sample.z[:, 1:, head].flatten(0, 1)
        mean = z.mean(0)
        # o = z W_O = (z R^T) Q^T with orthonormal Q: the components are found in as many dimensions as the head has
        basis, triangle = torch.linalg.qr(w.W_O[head].mT)
        outputs = (z - mean) @ triangle.mT
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        while sum(len(read) for read in reads) < len(rows):
            if len(reads) % 2:
                read, write = -reads[-1], -writes[-1]
            else:
                half = torch.randperm(len(outputs), generator=generator)[: (len(outputs) + 1) // 2]
                read, write, *_ = independent_components(outputs[half], generator, iterations=ICA_ITERATIONS)
                read, write = read @ triangle, write @ basis.mT
            reads.append(read)
            writes.append(write)
        read, write = torch.cat(reads)[: len(rows)], torch.cat(writes)[: len(rows)]
        _set_values(lorsa, rows, read, write, w, head, scales)
        # the row sum of a pattern is 1 (below it with a sink, where training corrects the difference)
        bias = 0.0 if w.b_V is None else read @ w.b_V[head] * scales[1]
        lorsa.b_V[rows] = bias - read @ mean * scales[1]
        lorsa.b_D += mean @ w.W_O[head] * scales[1]


def _rows_of(host: Tensor, head: int, size: int) -> Int[Tensor, " m"]:
    """The Lorsa heads in the groups that original head `head` hosts."""
    groups = (host == head).nonzero()
    return (groups * size + torch.arange(size)).flatten()


def _set_values(
    lorsa: Lorsa, rows: Tensor, read: Tensor, write: Tensor, w: AttentionWeights, head: int, scales: tuple[float, float]
) -> None:
    """Let Lorsa heads `rows` read the combinations `read` [m, dv] of the head's values and write `write` [m, d]."""
    f_in, f_out = scales
    lorsa.W_V[rows] = read @ w.W_V[head].mT * (f_out / f_in)
    lorsa.W_O[rows] = write
    if w.b_V is not None:
        lorsa.b_V[rows] = read @ w.b_V[head] * f_out


def _reference(
    lorsa: Lorsa, w: AttentionWeights, sample: Sample, scales: tuple[float, float], generator: Generator
) -> None:
    """The reference implementation's start, as its documentation describes it: queries and keys repeated without
    their biases; per original head the value space's active subspace on the sample, Gaussian mixtures of it, both
    value vectors at norm 1; zero decoder bias; one common decoder norm from a grid search.
    """
    host = _hosts_evenly(lorsa.config.n_groups, len(w.W_Q))
    copy_queries_keys(lorsa, w, host, scales[0], biases=False)
    x = sample.x[:, 1:].flatten(0, 1)
    for head in range(len(w.W_Q)):
        rows = _rows_of(host, head, lorsa.config.group_size)
        dv = w.W_V.shape[-1]
        captured = x @ w.W_V[head] @ w.W_V[head].mT
        basis = torch.linalg.svd(_covariance(captured))[0][:, :dv]
        read = torch.randn(len(rows), dv, generator=generator) @ basis.mT
        lorsa.W_V[rows] = F.normalize(read, dim=-1)
        lorsa.W_O[rows] = F.normalize(lorsa.W_V[rows] @ w.W_V[head] @ w.W_O[head], dim=-1)


def _covariance(rows: Float[Tensor, "r d"]) -> Float[Tensor, "d d"]:
    centred = rows - rows.mean(0)
    return centred.mT @ centred / len(rows)


def _fit_value_scale(lorsa: Lorsa, sample: Sample, scales: tuple[float, float], grid: bool) -> None:
    """Scale all values by one number so that the kept heads together fit the targets of the sample best.

    The kept heads do not change with the number, so the best one is a least-squares quotient; `grid` searches it as the
    reference does (50 coarse and 20 fine points).
    """
    x, y = sample.x[:16] * scales[0], sample.y[:16, 1:] * scales[1]
    target = y - lorsa.b_D
    guess = torch.cat([lorsa(part).y for part in x.split(8)])[:, 1:] - lorsa.b_D
    best = float((guess * target).sum() / guess.square().sum())
    if best <= 0:  # the kept heads point away from the targets; training has to turn them, not a negative scale
        return
    if grid:
        error = lambda points: torch.stack([(target - p * guess).square().sum() for p in points])  # noqa: E731
        coarse = torch.logspace(-2, 1, 50)
        middle = int(error(coarse).argmin())
        fine = torch.linspace(float(coarse[max(0, middle - 1)]), float(coarse[min(49, middle + 1)]), 20)
        best = float(fine[error(fine).argmin()])
    lorsa.W_V *= best
    lorsa.b_V *= best
