"""`clearhead pretrain --gates`: a small model that attends through few edges from the first step on.

The model of `clearhead pretrain` before its first step is written to `start/` of the run directory, and post-trained
from there (posttrain.py) with the constraint CE ≤ target: while the loss is above it the multiplier is at its upper
bound and training is plain pretraining through gates that are nearly all open; below it edges close. What the paper
(arXiv 2512.05865) leaves open is whether this ends sparser than sparsifying a finished model.
"""

from pathlib import Path
from typing import Any

from clearhead.config import Pretrain, Sparsify
from clearhead.sparsify.posttrain import posttrain
from clearhead.training.language_model import save_model
from clearhead.training.pretrain import build_model, open_tokenizer


def pretrain_gated(config: Pretrain) -> dict[str, Any]:
    """Train (or finish training) one model in `sparse/` of the run directory; returns that run's summary.

    Raises what `posttrain` and `open_tokenizer` raise.
    """
    config = config.resolved()
    directory = config.directory()
    start = directory / "start"
    if not start.exists():
        tokenizer = open_tokenizer(config)
        save_model(build_model(config, tokenizer), tokenizer, start)
    return posttrain(gated_settings(config, start))


def gated_settings(config: Pretrain, start: Path) -> Sparsify:
    """The post-training that a pretraining with gates is."""
    return Sparsify(
        model=str(start),
        text=config.text,
        context=config.context,
        tokens=config.tokens,
        batch_tokens=config.batch_tokens,
        tolerance=0.0,
        target=config.target,
        constraint="ce",
        lr=config.lr,
        gate_lr_factor=1.0,
        repeat_share=config.repeat_share,
        seed=config.seed,
        device=config.device,
        out=config.directory() / "sparse",
        resume=config.resume,
    )
