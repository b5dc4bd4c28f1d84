"""A sparse model on disk: an ordinary Hugging Face folder whose checkpoint also holds the gates.

`Model.load` puts the gates back and attends through them, `generate` included. Plain transformers ignores them and says
so: their tensors stand in its report of weights that found no place. Adapters are merged before. The upload of such a
folder is `dictionary.push_to_hub`.
"""

from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.gates import SETTINGS, find_gates
from clearhead.training.language_model import save_model


def export_model(
    model: Model, folder: Path, provenance: dict[str, Any], rates: dict[int, Float[Tensor, " h"]] | None = None
) -> None:
    """Writes model, gates and tokenizer, whole or not at all; `provenance` goes into the config beside the settings.

    `rates`: the share of edges by layer and head of a control whose edges are open by lot, which is loaded as such.

    Raises `ClearheadError` for a model without gates or without a tokenizer.
    """
    if find_gates(model.hf) is None:
        raise ClearheadError(f"{model.name} has no edge gates; install them, or save it with save_pretrained")
    if model.tokenizer is None:
        raise ClearheadError(f"{model.name} was loaded without a tokenizer, which belongs into the folder")
    settings = getattr(model.hf.config, SETTINGS) | provenance
    if rates is not None:
        settings["rates"] = {str(layer): row.tolist() for layer, row in rates.items()}
    setattr(model.hf.config, SETTINGS, settings)
    save_model(model.hf, model.tokenizer, folder)
