"""The texts of a spectral run: one prompt, the clean prompts of a task, or blocks of a longer text."""

import torch

from clearhead.config import OfTexts
from clearhead.data.tasks import Task, open_task
from clearhead.data.text import token_blocks
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.spectral.firings import Prompts


def read_prompts(model: Model, config: OfTexts) -> tuple[Prompts, Task | None]:
    """The texts in the model's tokens, and the task they belong to if they do.

    Blocks of a text are of its held-out part, so that a model trained on the rest here has not seen them. Raises
    `ClearheadError` for a task that the model's tokenizer cannot take and a text shorter than one block.
    """
    if config.prompt is not None:
        return Prompts([config.prompt], [model.tokenize(config.prompt)[0].cpu()], "prompt"), None
    if config.task is not None:
        behaviour = open_task(config.task, model, config.prompts, config.seed)
        names = [behaviour.items[index].template for index in behaviour.tokens]
        return Prompts(names, [torch.tensor(ids.clean) for ids in behaviour.tokens.values()], config.task), behaviour
    if model.n_ctx is not None and config.context > model.n_ctx:
        raise ClearheadError(
            f"--context {config.context} is more than {model.name} can see; give at most {model.n_ctx}"
        )
    source = config.text or "default"
    blocks = token_blocks(model, source, split="held_out", n_tokens=config.tokens, context=config.context, at_most=True)
    names = [blocks.document_at(block, 0) for block in range(len(blocks))]
    return Prompts(names, list(blocks.tokens), source), None
