"""Prompts of random tokens for the tiny models, and models that are the same but for their grouped keys."""

import torch

from clearhead.data.tasks import TaskBatch
from clearhead.model import Model
from tests.model import tiny_configs
from tests.model.tiny_configs import VOCABULARY, build


def random_rows(n: int = 3, length: int = 7, vocabulary: int = VOCABULARY, seed: int = 0) -> TaskBatch:
    """Clean and corrupt prompts that differ in two tokens; answers are two tokens against one."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(3, vocabulary, (n, length), generator=generator)
    corrupt = clean.clone()
    corrupt[:, 1:3] = torch.randint(3, vocabulary, (n, 2), generator=generator)
    return TaskBatch(
        items=list(range(n)),
        clean=clean,
        corrupt=corrupt,
        answers=[[3 + row, 9] for row in range(n)],
        wrong_answers=[[20 + row] for row in range(n)],
        labels={},
    )


def double_model(family: str) -> Model:
    return Model(build(family).double(), name=family, self_test=False)


def ungrouped_model(monkeypatch) -> Model:
    """The tiny Llama with each kv head copied for each of its query heads."""
    monkeypatch.setitem(
        tiny_configs.CONFIGS, "ungrouped", tiny_configs.LLAMA | {"model_type": "llama", "num_key_value_heads": 4}
    )
    grouped, copied = build("llama"), build("ungrouped")
    state = grouped.state_dict()
    for name in list(state):
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    copied.load_state_dict(state)
    return Model(copied.double(), name="ungrouped", self_test=False)
