"""What a model's configuration alone says: its structure, for plans that should not load weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from clearhead.errors import ClearheadError
from clearhead.hub import offline
from clearhead.model.access import Model
from clearhead.model.loading import BUNDLED

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Size of a number in each format."""


def without_weights(name: str) -> Model:
    """The model's structure, on torch's meta device: every size is right and no weight is read.

    Raises `ClearheadError` when no configuration of that name can be found.
    """
    source = str(BUNDLED[name]()) if name in BUNDLED else name
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=offline())
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ClearheadError(
            f"there is no model {name!r} here or on the hub ({str(error).splitlines()[0]}); give a Hugging Face id, a "
            f"local folder, or one of {', '.join(BUNDLED)}"
        ) from error
    return Model(hf, name=name, self_test=False)
