"""The edits of a forward that put dictionaries in the place of the modules they imitate, some of their units silent.

What a silent unit would write is left out of the stream, and nothing else: what is active beside it was chosen with it.
Position 0 keeps the model's own output. Losses with units silent say what the replaced model needs them for.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.model.access import Model
from clearhead.model.run import Edit, Run, keep_first
from clearhead.units import Unit


def in_place(dictionaries: Dictionaries, silent: Collection[Unit] = ()) -> dict[str, Edit]:
    """By site, what is written there: the outputs of Lorsas and transcoders without the Lorsa heads and features."""
    edits = {}
    for layer, lorsa in dictionaries.attention.items():
        off = [unit.index or 0 for unit in silent if (unit.kind, unit.layer) == ("lorsa", layer)]
        edits[f"attn_out.{layer}"] = _instead(f"attn_in.{layer}", lorsa, off)
    for layer, one in dictionaries.mlp.items():
        off = [unit.index or 0 for unit in silent if (unit.kind, unit.layer) == ("feature", layer)]
        edits[f"mlp_out.{layer}"] = _instead(f"mlp_in.{layer}", one, off)
    return edits


@torch.no_grad()
def losses(
    model: Model, tokens: Int[Tensor, "b t"], edit: dict[str, Edit], batch_blocks: int = 16
) -> Float[Tensor, "b s"]:
    """Loss (nats) of the edited model at predictions 1..T-1 of each block; [b, t - 1]."""
    read, found = [*(site.replace("_out.", "_in.") for site in edit), "logits"], []
    for batch in tokens.to(model.device).split(batch_blocks):
        logits = model.run(batch, read=read, edit=edit)["logits"][:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        found.append(loss.view(len(batch), -1))
    return torch.cat(found)


def _instead(site: str, one: Lorsa | Transcoder, off: list[int]) -> Edit:
    """A module's output replaced by what a dictionary says, but for position 0."""

    def write(_: Tensor, run: Run) -> Tensor:
        x = run[site].to(next(one.parameters()))
        said = one(x).y
        if off:
            values, units = one.encode(x)
            active = values.new_zeros(*x.shape[:-1], one.n_units).scatter_add_(-1, units, values)
            said = said - active[..., off] @ one.decoder_rows(torch.tensor(off, device=x.device))
        return said

    return keep_first(write)
