"""From firings to verdicts: every head's numbers, its controls, p values corrected over all heads, and the verdict."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.config import Basis
from clearhead.model.access import Model
from clearhead.runs import progress
from clearhead.spectral.census import Census
from clearhead.spectral.control_runs import compare_subspaces, compare_untrained
from clearhead.spectral.controls import Separation, compare, corrected, gauge, random_rotations, shuffle, span
from clearhead.spectral.firings import Firings, Prompts
from clearhead.spectral.sparsity import cancellation, largest_rank, n_recon, rolls_tovee
from clearhead.spectral.verdicts import Verdict, judge

Place = tuple[int, int]
"""Layer and head."""


@dataclass(frozen=True)
class HeadNumbers:
    """One head's statistics over its firings; None without firings."""

    sparsity: float | None = None
    n_recon: float | None = None
    cancellation: float | None = None
    largest_rank: float | None = None


def measure_head(firings: Firings) -> HeadNumbers:
    """Mean S and medians over the firings of one head."""
    if not len(firings):
        return HeadNumbers()
    c = firings.contributions
    return HeadNumbers(
        sparsity=float(rolls_tovee(c).double().mean()),
        n_recon=float(n_recon(c).double().quantile(0.5)),
        cancellation=float(cancellation(c).double().quantile(0.5)),
        largest_rank=float(largest_rank(c).double().quantile(0.5)),
    )


def compare_all(
    model: Model, prompts: Prompts, census: Census, *, draws: int, seed: int, untrained: bool = True
) -> dict[Place, dict[str, Separation]]:
    """Every head with firings against every control; `census.seconds` gains what each took."""
    found: dict[Place, dict[str, Separation]] = {}
    begun = time.process_time()
    generator = torch.Generator().manual_seed(seed)
    rotations: dict[int, Tensor] = {}
    with progress("rotated bases", len(census.layers), "layers") as advance:
        for layer, of_layer in census.layers.items():
            for head in range(of_layer.modes.n_heads):
                firings, r = of_layer.firings.of_head(head), of_layer.firings.A.shape[-1]
                if not len(firings) or not int(of_layer.modes.svd.rank[head]):
                    continue
                if r not in rotations:
                    rotations[r] = random_rotations(draws, r, generator)
                own = compare_bases(firings, rotations[r], generator, of_layer.basis, unmixed=of_layer.unmixed)
                found[layer, head] = {separation.control: separation for separation in own}
            advance(1)
    census.seconds["rotations and shuffles"] = time.process_time() - begun
    begun = time.process_time()
    drawn = [compare_subspaces(model, prompts, census, seed)]
    census.seconds["random subspaces"] = time.process_time() - begun
    begun = time.process_time()
    if untrained:
        drawn.append(compare_untrained(model, prompts, census, seed))
    census.seconds["untrained weights"] = time.process_time() - begun
    for separations in drawn:
        for place, some in separations.items():
            found.setdefault(place, {}).update({separation.control: separation for separation in some})
    return found


def compare_bases(
    firings: Firings,
    rotations: Float[Tensor, "m r r"],
    generator: torch.Generator,
    basis: Basis,
    *,
    unmixed: bool,
) -> list[Separation]:
    """One head's firings against rotated bases, rotated spans and shuffled keys, as far as each is a control of it.

    Spans need contributions that no rotation mixes (`unmixed`) and singular values that are not zero; keys are
    exchanged between firings of one basis.
    """
    draws, n = len(rotations), len(firings)
    A, D, S = firings.A, firings.D, firings.S
    controls = {"gauge": gauge(A, D, rotations)}
    if unmixed and bool((S > 0).all()):
        controls["span"] = span(A, D, S, firings.bias, rotations)
    group = firings.key - firings.query if basis == "offset" else torch.zeros(n, dtype=torch.int64)
    exchanged = _in_company(group)
    found = [compare(name, draw, draws, A * D, firings.prompt, generator) for name, draw in controls.items()]
    if bool(exchanged.any()):
        some = firings.where(exchanged)
        draw = shuffle(some.A, some.D, exchanges(group[exchanged], draws, generator))
        found.append(compare("shuffle", draw, draws, some.contributions, some.prompt, generator))
    return found


def _in_company(group: Int[Tensor, " n"]) -> Tensor:
    """Which members share their group with another."""
    _, place, count = group.unique(return_inverse=True, return_counts=True)
    return count[place] > 1


def exchanges(group: Int[Tensor, " n"], draws: int, generator: torch.Generator) -> Int[Tensor, "m n"]:
    """Random permutations within groups: row d maps each member to the one whose place it takes."""
    _, place = group.unique(return_inverse=True)
    home = place.argsort(stable=True)
    # sorted by group, and within it at random
    order = (place + torch.rand(draws, len(group), generator=generator).clamp_max(0.999)).argsort(-1)
    moved = torch.empty_like(order)
    moved[:, home] = order
    return moved


@dataclass(frozen=True)
class Judged:
    """Every head's numbers, corrected p values and verdict."""

    numbers: dict[Place, HeadNumbers]
    q: dict[tuple[int, int, str], float]
    verdicts: dict[Place, Verdict]


def judge_all(census: Census, separations: Mapping[Place, Mapping[str, Separation]]) -> Judged:
    """Verdicts on all heads; p is corrected over all heads with firings, per control."""
    q: dict[tuple[int, int, str], float] = {}
    for name in sorted({name for some in separations.values() for name in some}):
        tested = {place: some[name].p for place, some in separations.items() if name in some}
        known = {place: p for place, p in tested.items() if p is not None}
        for (layer, head), value in zip(known, corrected(list(known.values())), strict=True):
            q[layer, head, name] = value
    numbers, verdicts = {}, {}
    for layer, found in census.layers.items():
        for head in range(found.modes.n_heads):
            place, firings = (layer, head), found.firings.of_head(head)
            # without a product there is nothing that modes could share out
            numbers[place] = measure_head(firings) if int(found.modes.svd.rank[head]) else HeadNumbers()
            verdicts[place] = judge(
                rank=int(found.modes.svd.rank[head]),
                n_firings=int(found.n_firings[head]),
                n_sink=int(found.n_sink[head]),
                n_texts=len(firings.prompt.unique()),
                energy=float(torch.minimum(found.energy_query[head], found.energy_key[head])),
                cancellation=numbers[place].cancellation,
                separations={
                    name: (one, q.get((layer, head, name))) for name, one in separations.get(place, {}).items()
                },
            )
    return Judged(numbers, q, verdicts)
