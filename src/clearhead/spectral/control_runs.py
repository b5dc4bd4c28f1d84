"""The two controls that need a model: random subspaces of its residual stream, and its own architecture untrained.

Both look at the very firings that the census kept. `subspace` replaces U and V by random orthonormal directions of the
stream that the heads read, c = (x·U′) S (V′·(y − ȳ)): is the sparsity that of any directions with this spectrum?
`untrained` asks the same pairs of a model with initial
weights (its transformers class initialises it, from a seed): is the sparsity there before training?
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM

from clearhead.config import Basis
from clearhead.model.access import Model
from clearhead.model.weights import attention_norm
from clearhead.runs import progress
from clearhead.spectral.attention_modes import HeadModes
from clearhead.spectral.census import Census, LayerCensus, decompose_layers
from clearhead.spectral.controls import Separation, separation
from clearhead.spectral.firings import (
    Firings,
    Prompts,
    express,
    head_vectors,
    read_queries_and_keys,
)
from clearhead.spectral.sparsity import n_recon, relative_key, rolls_tovee, visible_count, visible_mean

SUBSPACE_DRAWS = 20
UNTRAINED_SEEDS = 3

Drawn = dict[tuple[int, int], list[Separation]]
"""Separations by (layer, head)."""


def compare_subspaces(model: Model, prompts: Prompts, census: Census, seed: int) -> Drawn:
    """Every head with firings against `SUBSPACE_DRAWS` random pairs of subspaces of the residual stream.

    Layers whose firings are in the fixed basis of a product that rotates are left out (see `controls`).
    """
    fair = {layer: found for layer, found in census.layers.items() if found.unmixed}
    generator = torch.Generator().manual_seed(seed)
    collected = {layer: _Collected(SUBSPACE_DRAWS) for layer in fair}
    frames = {layer: _random_frames(found, model.d_model, generator) for layer, found in fair.items()}
    with progress("random subspaces", prompts.n_tokens) as advance:
        for numbers, tokens in prompts.batches(model):
            run = model.run(tokens, read=[f"resid_pre.{layer}" for layer in fair])
            for layer, found in fair.items():
                for chosen, row in _in_batch(found.firings, numbers):
                    norm = attention_norm(model, layer)
                    stream = run[f"resid_pre.{layer}"].to(frames[layer][0].dtype)
                    x = stream if norm is None else norm.normalise(stream)
                    collected[layer].add(chosen, _subspace_contributions(found, frames[layer], x.cpu(), chosen, row))
            advance(tokens.numel())
    return _separations("subspace", census, collected, generator)


def compare_untrained(model: Model, prompts: Prompts, census: Census, seed: int) -> Drawn:
    """Every head with firings against the same pairs in `UNTRAINED_SEEDS` models with initial weights."""
    collected = {layer: _Collected(UNTRAINED_SEEDS) for layer in census.layers}
    for draw in range(UNTRAINED_SEEDS):
        blank = untrained(model, seed + draw)
        modes, _ = decompose_layers(blank, list(census.layers))
        firings = {layer: census.layers[layer].firings for layer in modes}
        for layer, chosen, seen in sides_of_firings(blank, modes, firings, prompts, census.basis):
            collected[layer].add(chosen, seen.contributions[None], draw)
    return _separations("untrained", census, collected, torch.Generator().manual_seed(seed))


def sides_of_firings(
    model: Model,
    modes: Mapping[int, HeadModes],
    firings: Mapping[int, Firings],
    prompts: Prompts,
    basis: Basis,
    quiet: bool = False,
) -> Iterator[tuple[int, Int[Tensor, " n"], Firings]]:
    """Layer, indices of firings, and those firings as `model` has them, which were found in another model."""
    with progress(f"{model.name} at given pairs", prompts.n_tokens, quiet=quiet) as advance:
        for numbers, tokens in prompts.batches(model):
            for layer, (q, k) in read_queries_and_keys(model, list(modes), tokens).items():
                for chosen, row in _in_batch(firings[layer], numbers):
                    some = firings[layer].where(chosen)
                    places = [part.to(q.device) for part in (row, some.head, some.query, some.key)]
                    x, d, _ = head_vectors(modes[layer], q, k, *places)
                    yield layer, chosen, express(modes[layer].to(x.dtype, "cpu"), some.moved(x.cpu(), d.cpu()), basis)
            advance(tokens.numel())


def untrained(model: Model, seed: int) -> Model:
    """The model's architecture with the initial weights that transformers draws for it, from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blank = AutoModelForCausalLM.from_config(model.hf.config, dtype=model.dtype)
    return Model(blank.to(model.device), model.tokenizer, name=f"{model.name} untrained, seed {seed}", self_test=False)


class _Collected:
    """S and N_recon of firings under the draws of a control, in the order in which they come."""

    def __init__(self, draws: int):
        self.draws = draws
        self.firing: list[Tensor] = []
        self.draw: list[Tensor] = []
        self.sparsity: list[Tensor] = []
        self.counts: list[Tensor] = []

    def add(self, chosen: Tensor, c: Float[Tensor, "m n r"], first_draw: int = 0) -> None:
        m = len(c)
        self.firing.append(chosen.expand(m, -1).flatten())
        self.draw.append((torch.arange(m) + first_draw)[:, None].expand(-1, c.shape[1]).flatten())
        self.sparsity.append(rolls_tovee(c).double().flatten())
        self.counts.append(n_recon(c).flatten())

    def table(self, n: int) -> tuple[Float[Tensor, "draws n"], Int[Tensor, "draws n"]]:
        """S and N_recon of every draw and firing."""
        place = torch.cat(self.draw), torch.cat(self.firing)
        sparsity = torch.zeros(self.draws, n, dtype=torch.float64)
        counts = torch.zeros(self.draws, n, dtype=torch.int64)
        sparsity[place], counts[place] = torch.cat(self.sparsity), torch.cat(self.counts)
        return sparsity, counts


def _separations(
    control: str, census: Census, collected: Mapping[int, _Collected], generator: torch.Generator
) -> Drawn:
    result: Drawn = {}
    for layer, found in census.layers.items():
        if layer not in collected or not collected[layer].firing:
            continue
        sparsity, counts = collected[layer].table(len(found.firings))
        own = rolls_tovee(found.firings.contributions).double()
        for head in range(found.modes.n_heads):
            mine = (found.firings.head == head) & ~found.firings.sink
            rank = int(found.modes.svd.rank[head])
            # a random subspace stands for directions that the head has
            comparable = rank == found.firings.A.shape[-1] if control == "subspace" else rank > 0
            if comparable and bool(mine.any()):
                of_head = sparsity[:, mine]
                result.setdefault((layer, head), []).append(
                    separation(
                        control,
                        own[mine],
                        of_head.mean(-1),
                        of_head.mean(0),
                        counts[:, mine].flatten(),
                        found.firings.prompt[mine],
                        generator,
                    )
                )
    return result


def _in_batch(firings: Firings, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices of the firings whose text is in the batch, with its row; nothing where there are none."""
    match = firings.prompt[:, None] == numbers[None]
    chosen, row = match.nonzero(as_tuple=True)
    if len(chosen):
        yield chosen, row


def _random_frames(found: LayerCensus, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random orthonormal directions [draws, d, r] for the query and the key side; one pair per draw for the layer."""
    r = min(found.modes.svd.S.shape[-1], d)
    made: Sequence[Tensor] = [
        torch.linalg.qr(torch.randn(SUBSPACE_DRAWS, d, r, generator=generator))[0] for _ in range(2)
    ]
    return made[0], made[1]


def _subspace_contributions(
    found: LayerCensus, frames: tuple[Tensor, Tensor], x: Float[Tensor, "b t d"], chosen: Tensor, row: Tensor
) -> Float[Tensor, "m n r"]:
    f, window = found.firings.where(chosen), found.modes.geometry.window
    count = visible_count(f.query, window)
    mean = visible_mean(x, window)[row, f.query]
    query, key = frames
    left = x[row, f.query] @ query * f.S[:, : query.shape[-1]]
    return left * relative_key(x[row, f.key] @ key, mean @ key, count)
