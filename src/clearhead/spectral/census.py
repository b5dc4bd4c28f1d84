"""A census: every head of a model over many texts, in one forward per batch.

For each layer: its modes, the firings of its heads (firings.py), how often they fire, how much of the tokens' energy
their read directions catch, and four behaviours of the whole head:

    previous    attention to the token before                            over the texts
    sink        attention to the first token                             over the texts
    duplicate   attention to the earlier copy of the query's token       on random tokens, repeated
    induction   attention to what followed the earlier copy              on random tokens, repeated

Energy is the mean square of a token's coordinate along the read directions, for tokens of unit mean square, on the
first thousand tokens: 1 is what random directions catch. A head whose directions catch almost nothing has modes that no
text constrains. Nothing of size (query, key, mode) is formed: cost and memory are those of reading q, k and patterns.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.config import Basis
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.weights import attention_norm
from clearhead.runs import progress
from clearhead.spectral.attention_modes import HeadModes, head_modes
from clearhead.spectral.firings import (
    KEEP,
    KEEP_SINKS,
    THRESHOLD,
    Firings,
    Pairs,
    Prompts,
    Sites,
    express,
    find_firings,
    read_sites,
    verify_pattern,
)

REPEATED_BLOCKS, REPEATED_HALF = 4, 25
"""Random tokens that the duplicate and induction scores are measured on: this many blocks of twice this many tokens."""


@dataclass
class LayerCensus:
    """What the census found of one layer; every per-head tensor is [h]."""

    modes: HeadModes
    firings: Firings
    n_firings: Int[Tensor, " h"]
    """All firings, those on sinks left out; `firings` holds a sample of them."""
    n_sink: Int[Tensor, " h"]
    basis: Basis
    """The basis the firings are in: `fixed` also where a layer has no offsets of its own."""
    energy_query: Float[Tensor, " h"]
    energy_key: Float[Tensor, " h"]
    behaviour: dict[str, Float[Tensor, " h"]]
    """previous, sink, duplicate, induction."""

    @property
    def unmixed(self) -> bool:
        """Whether A and D are coordinates along the modes' directions, which RoPE in the fixed basis mixes."""
        return self.basis == "offset" or self.modes.geometry.rope is None


@dataclass
class Census:
    """All layers, what was refused, and what the time went into."""

    layers: dict[int, LayerCensus]
    refused: dict[int, str]
    """Layers without a query–key product, with the reason."""
    threshold: float
    basis: Basis
    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the process: `decomposition`, `forward`, `statistics`."""


def take_census(
    model: Model,
    prompts: Prompts,
    *,
    layers: Sequence[int] | None = None,
    threshold: float = THRESHOLD,
    basis: Basis = "offset",
    keep: int = KEEP,
    keep_sinks: int = KEEP_SINKS,
    seed: int = 0,
    quiet: bool = False,
) -> Census:
    """The census of `layers` (default: all with attention) over the texts; `quiet` hides its progress.

    Raises `ClearheadError` where no layer can be decomposed, for a threshold below 0.5 (two keys could pass it) or not
    below 1, and where attention rebuilt from the modes is not the model's own.
    """
    if not 0.5 <= threshold < 1:
        raise ClearheadError(
            f"threshold {threshold}: give a share of attention from 0.5 (one key can exceed it) to below 1"
        )
    spent: dict[str, float] = {"decomposition": 0.0, "forward": 0.0, "statistics": 0.0}
    with _timed(spent, "decomposition"):
        modes, refused = decompose_layers(model, model.attention_layers if layers is None else layers)
    pieces: dict[int, list[Pairs]] = {layer: [] for layer in modes}
    sums = {layer: _Sums.empty(modes[layer]) for layer in modes}
    generator = torch.Generator().manual_seed(seed)
    first = True
    with progress("census", prompts.n_tokens, quiet=quiet) as advance:
        for numbers, tokens in prompts.batches(model):
            with _timed(spent, "forward"):
                sites = read_sites(model, list(modes), tokens)
            with _timed(spent, "statistics"):
                for layer, seen in sites.items():
                    if first:
                        verify_pattern(modes[layer], seen, model.dtype)
                    found = find_firings(modes[layer], seen, numbers, generator, threshold)
                    sums[layer].add(modes[layer], seen, found)
                    pieces[layer] = [Pairs.joined([*pieces[layer], found]).sampled(keep, keep_sinks)]
            first = False
            advance(tokens.numel())
    with _timed(spent, "statistics"):
        repeated = repeated_behaviour(model, list(modes), seed)
        energies = measure_energy(model, modes, next(prompts.batches(model))[1])
        found = {}
        for layer, of_layer in modes.items():
            own: Basis = basis if of_layer.has_offsets else "fixed"
            firings = express(_on_cpu(of_layer), pieces[layer][0], own)
            found[layer] = sums[layer].census(of_layer, firings, own, energies[layer], repeated[layer])
    return Census(found, refused, threshold, basis, spent)


def decompose_layers(model: Model, layers: Sequence[int]) -> tuple[dict[int, HeadModes], dict[int, str]]:
    """Modes of each layer, in float32 at least, and the layers that have none with the reason."""
    modes, refused = {}, {}
    for layer in layers:
        try:
            modes[layer] = head_modes(model, layer, torch.promote_types(model.dtype, torch.float32))
        except ClearheadError as error:
            refused[layer] = str(error)
    if not modes:
        raise ClearheadError(f"no layer of {model.name} has query–key products: {next(iter(refused.values()), 'none')}")
    return modes, refused


def repeated_behaviour(model: Model, layers: Sequence[int], seed: int) -> dict[int, dict[str, Float[Tensor, " h"]]]:
    """Duplicate and induction scores of every head: attention in the second half of random tokens said twice."""
    generator = torch.Generator().manual_seed(seed)
    half = REPEATED_HALF if model.n_ctx is None else min(REPEATED_HALF, model.n_ctx // 2)
    once = torch.randint(model.d_vocab, (REPEATED_BLOCKS, half), generator=generator)
    sites = read_sites(model, layers, once.repeat(1, 2).to(model.device))
    second = torch.arange(half, 2 * half)
    scores = {}
    for layer, seen in sites.items():
        # the copy of the first one is the first token, where attention rests anyway
        duplicate = seen.pattern[:, :, second[1:], second[1:] - half].mean((0, 2)).cpu()
        induction = seen.pattern[:, :, second, second - half + 1].mean((0, 2)).cpu()
        scores[layer] = {"duplicate": duplicate, "induction": induction}
    return scores


ENERGY_TOKENS = 1024


def measure_energy(
    model: Model, modes: dict[int, HeadModes], tokens: Int[Tensor, "b t"]
) -> dict[int, tuple[Float[Tensor, " h"], Float[Tensor, " h"]]]:
    """Mean square of tokens' coordinates along each head's query and key directions, for tokens of unit mean square.

    Read from the residual stream, normalised as the layer normalises it, so that neither biases nor rotations count.
    """
    some = tokens[: max(1, ENERGY_TOKENS // tokens.shape[1])]
    run = model.run(some, read=[f"resid_pre.{layer}" for layer in modes])
    energies = {}
    for layer, of_layer in modes.items():
        norm, stream = attention_norm(model, layer), run[f"resid_pre.{layer}"].float().flatten(0, 1)
        x = stream if norm is None else norm.normalise(stream)
        x = x / x.square().mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)
        real = (~of_layer.outside).sum(-1).clamp_min(1)
        query, key = (
            (torch.einsum("nd,hdr->nhr", x, side.float()).square().mean(0) * ~of_layer.outside).sum(-1) / real
            for side in (of_layer.svd.U, of_layer.svd.V)
        )
        energies[layer] = query.double().cpu(), key.double().cpu()
    return energies


def _on_cpu(modes: HeadModes) -> HeadModes:
    return modes.to(modes.G_q.dtype, "cpu")


@dataclass
class _Sums:
    """Sums over all tokens of the texts, per head."""

    n_firings: Tensor
    n_sink: Tensor
    previous: Tensor
    sink: Tensor
    n_later: int = 0
    """Tokens that have one before them."""

    @classmethod
    def empty(cls, modes: HeadModes) -> "_Sums":
        count, total = torch.zeros(modes.n_heads, dtype=torch.int64), torch.zeros(modes.n_heads, dtype=torch.float64)
        return cls(count, count.clone(), total, total.clone())

    def add(self, modes: HeadModes, sites: Sites, found: Pairs) -> None:
        self.n_firings += torch.bincount(found.head[~found.sink], minlength=modes.n_heads)
        self.n_sink += torch.bincount(found.head[found.sink], minlength=modes.n_heads)
        self.previous += sites.pattern.diagonal(-1, -2, -1).sum((0, 2)).double().cpu()
        self.sink += sites.pattern[..., 1:, 0].sum((0, 2)).double().cpu()
        self.n_later += sites.pattern.shape[0] * (sites.pattern.shape[-1] - 1)

    def census(
        self,
        modes: HeadModes,
        firings: Firings,
        basis: Basis,
        energies: tuple[Tensor, Tensor],
        repeated: dict[str, Tensor],
    ) -> LayerCensus:
        behaviour = {"previous": self.previous / self.n_later, "sink": self.sink / self.n_later, **repeated}
        return LayerCensus(modes, firings, self.n_firings, self.n_sink, basis, *energies, behaviour)


class _timed:  # noqa: N801
    """Adds the CPU seconds of its block to an entry of `spent`."""

    def __init__(self, spent: dict[str, float], name: str):
        self.spent, self.name = spent, name

    def __enter__(self) -> None:
        self.begun = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.spent[self.name] += time.process_time() - self.begun
