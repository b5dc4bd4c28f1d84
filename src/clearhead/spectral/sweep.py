"""S and N_recon of every head over the checkpoints of one model's training.

Heads of an untrained model do not fire, so a sweep that measured each checkpoint's own firings would compare different
places. Here the last checkpoint says where its heads look; every checkpoint is asked about those very pairs:

    for the pairs (head, text, query, key) that fire in the last checkpoint:
        S, N_recon, cancellation of the relative contributions at this checkpoint, S in rotated bases (gauge), and S
        with the directions rotated within what the head reads (span)

with the checkpoint's own behaviour scores and number of firings beside them. S falls where training makes few modes
carry the choice of a key. Rotated bases say how much of a fall any basis would show (SVF, 2602.13524, figures 7, 8);
the span control says how much of it is only that a few singular values grow first.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clearhead.config import Basis, Dtype
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.loading import BUNDLED
from clearhead.runs import progress
from clearhead.spectral.census import Census, LayerCensus, take_census
from clearhead.spectral.control_runs import sides_of_firings
from clearhead.spectral.controls import RECON_DRAWS, random_rotations
from clearhead.spectral.firings import Firings, Prompts
from clearhead.spectral.judging import compare_bases, measure_head

FEWEST_CHECKPOINTS = 2
_STEP = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True)
class Checkpoint:
    """A model of the sweep: what to load, and the training step it was kept at."""

    source: str
    revision: str | None
    step: int


@dataclass(frozen=True)
class SweepRow:
    """One head at one checkpoint."""

    step: int
    layer: int
    head: int
    pairs: int
    """Pairs measured: the head's firings in the last checkpoint."""
    sparsity: float | None
    n_recon: float | None
    cancellation: float | None
    gauge_sparsity: float | None
    gauge_n_recon: float | None
    span_sparsity: float | None
    """S with the directions rotated within what the head reads: what its singular values alone make of it."""
    n_firings: int
    """Firings of this checkpoint itself, sinks left out."""
    previous: float
    sink: float
    duplicate: float
    induction: float


def find_checkpoints(named: str) -> list[Checkpoint]:
    """The models that `named` stands for, by step.

    `MODEL@REVISION,REVISION` names revisions on the hub; a folder is a run of `clearhead pretrain` or holds one Hugging
    Face folder per checkpoint. The step is the last number in the name. Raises `ClearheadError` for names without one,
    and where fewer than two checkpoints are found.
    """
    folder = Path(named)
    if folder.is_dir():
        parent = folder / "snapshots" if (folder / "snapshots").is_dir() else folder
        found = [
            Checkpoint(str(path), None, _step(path.name))
            for path in parent.iterdir()
            if (path / "config.json").exists()
        ]
    elif "@" in named:
        model, _, revisions = named.partition("@")
        if model in BUNDLED or Path(model).is_dir():
            raise ClearheadError(
                f"{model} has no revisions; name a model on the hub, or a folder of checkpoint folders"
            )
        found = [Checkpoint(model, revision, _step(revision)) for revision in revisions.split(",") if revision]
    else:
        raise ClearheadError(
            f"{named} is no folder; give a run of `clearhead pretrain`, a folder of Hugging Face folders, or "
            "MODEL@REVISION,REVISION"
        )
    if len(found) < FEWEST_CHECKPOINTS:
        raise ClearheadError(f"{named} holds {len(found)} checkpoints; a sweep needs at least {FEWEST_CHECKPOINTS}")
    steps = [one.step for one in found]
    if len(set(steps)) < len(steps):
        raise ClearheadError(f"{named} holds two checkpoints of one step ({sorted(steps)}); keep one of each")
    return sorted(found, key=lambda one: one.step)


def _step(name: str) -> int:
    found = _STEP.search(name)
    if found is None:
        raise ClearheadError(f"the checkpoint {name!r} has no number in its name that could be its training step")
    return int(found[1])


def sweep(
    checkpoints: Sequence[Checkpoint],
    prompts: Prompts,
    last: Model,
    *,
    threshold: float,
    basis: Basis,
    seed: int,
    dtype: Dtype,
    device: str,
) -> Iterator[list[SweepRow]]:
    """The rows of each checkpoint, in order; `last` is the last of them, loaded, whose firings are followed."""
    followed = take_census(last, prompts, threshold=threshold, basis=basis, seed=seed)
    with progress("sweep", len(checkpoints), "checkpoints") as advance:
        for place, checkpoint in enumerate(checkpoints):
            at_end = place == len(checkpoints) - 1
            model = last if at_end else load(checkpoint, dtype, device)
            _refuse_other_model(checkpoint, model, last)
            yield measure_checkpoint(model, checkpoint.step, prompts, followed, threshold=threshold, seed=seed)
            advance(1)


def _refuse_other_model(checkpoint: Checkpoint, model: Model, last: Model) -> None:
    sizes = ("d_vocab", "n_layers", "d_model", "n_heads", "d_head")
    differ = [
        f"{name} {getattr(model, name)}, not {getattr(last, name)}"
        for name in sizes
        if getattr(model, name) != getattr(last, name)
    ]
    if differ:
        raise ClearheadError(
            f"{checkpoint.source} and the last checkpoint are not checkpoints of one model: {'; '.join(differ)}"
        )


def load(checkpoint: Checkpoint, dtype: Dtype, device: str) -> Model:
    """The model of a checkpoint."""
    return Model.load(checkpoint.source, revision=checkpoint.revision, dtype=dtype, device=device)


def measure_checkpoint(
    model: Model, step: int, prompts: Prompts, followed: Census, *, threshold: float, seed: int
) -> list[SweepRow]:
    """One checkpoint at the pairs of `followed`."""
    own = take_census(
        model,
        prompts,
        layers=list(followed.layers),
        threshold=threshold,
        basis=followed.basis,
        seed=seed,
        quiet=True,
    )
    moved = _at_pairs(model, prompts, own, followed)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for layer, firings in moved.items():
        for head in range(own.layers[layer].modes.n_heads):
            rows.append(_row(step, layer, head, firings.of_head(head), own.layers[layer], generator))
    return rows


def _at_pairs(model: Model, prompts: Prompts, own: Census, followed: Census) -> dict[int, Firings]:
    """The firings of `followed` with A and D as this checkpoint has them."""
    modes = {layer: found.modes for layer, found in own.layers.items()}
    firings = {layer: followed.layers[layer].firings for layer in modes}
    parts: dict[int, list[tuple[Tensor, Firings]]] = {layer: [] for layer in modes}
    for layer, chosen, seen in sides_of_firings(model, modes, firings, prompts, followed.basis, quiet=True):
        parts[layer].append((chosen, seen))
    moved = {}
    for layer, one in firings.items():
        order = torch.cat([chosen for chosen, _ in parts[layer]]).argsort() if parts[layer] else torch.arange(0)
        moved[layer] = Firings.joined([seen for _, seen in parts[layer]]).where(order) if len(order) else one
    return moved


def _row(step: int, layer: int, head: int, firings: Firings, own: LayerCensus, generator: torch.Generator) -> SweepRow:
    n, rank = len(firings), int(own.modes.svd.rank[head])
    numbers: dict[str, float | None] = dict.fromkeys(
        ("sparsity", "n_recon", "cancellation", "gauge_sparsity", "gauge_n_recon", "span_sparsity")
    )
    if n and rank:
        rotations = random_rotations(RECON_DRAWS, firings.A.shape[-1], generator)
        drawn = compare_bases(firings, rotations, generator, own.basis, unmixed=own.unmixed)
        found = {one.control: one for one in drawn}
        numbers = {name: getattr(measure_head(firings), name) for name in ("sparsity", "n_recon", "cancellation")} | {
            "gauge_sparsity": found["gauge"].sparsity,
            "gauge_n_recon": found["gauge"].n_recon,
            "span_sparsity": found["span"].sparsity if "span" in found else None,
        }
    behaviour = {name: float(values[head]) for name, values in own.behaviour.items()}
    return SweepRow(step, layer, head, n, n_firings=int(own.n_firings[head]), **numbers, **behaviour)
