"""Analyse a transcoder or SAE on text and write an atlas: when each feature is active, with examples.

The tables `units` and `examples` are those of a Lorsa (analyze.py), of the same numbers chosen in the same way, so that
features and heads can be compared; features have no z pattern and no host heads. The model runs once: what is active is
kept until the contexts are cut, 8 bytes for each active feature of each token (1M tokens, 64 active: 0.5 GB).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.analysis.activity import Activity
from clearhead.analysis.analyze import FIRST, about_atlas
from clearhead.analysis.contexts import Contexts
from clearhead.analysis.entries import Entries, entries_of
from clearhead.analysis.examples import ExampleCollector
from clearhead.analysis.token_texts import TokenTexts
from clearhead.analysis.unit_rows import activity_columns
from clearhead.atlas.read import Atlas
from clearhead.atlas.write import AtlasWriter
from clearhead.data.harvest import refuse_non_finite
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.lorsa import Codes
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import progress
from clearhead.units.unit import Unit


def analyze_features(
    module: Transcoder,
    model: Model,
    blocks: TokenBlocks,
    out: str | Path,
    *,
    top: int = 16,
    quantiles: int = 8,
    negatives: int = 4,
    batch_blocks: int = 8,
    seed: int = 0,
) -> Atlas:
    """Analyse every feature of `module` over all of `blocks` and write the atlas `out`, replacing an earlier one.

    top, quantiles, negatives: examples per feature of each category.
    Raises `ClearheadError` when dictionary and model do not belong together or there are no blocks, `NonFiniteError`
    naming site, block and position.
    """
    layer, site = _place(module, model, blocks)
    activity = Activity(module.n_units)
    examples = ExampleCollector(
        module.n_units,
        len(blocks.tokens),
        blocks.context,
        top=top,
        quantiles=quantiles,
        negatives=negatives,
        first=FIRST,
        seed=seed,
    )
    kept: list[tuple[int, Codes]] = []
    with progress("activity", blocks.tokens.numel()) as advance:
        for first in range(0, len(blocks.tokens), batch_blocks):
            codes = _encode(module, model, site, blocks, first, batch_blocks)
            entries = _entries(first, codes, FIRST)
            activity.update(entries)
            examples.update(entries)
            kept.append((first, codes))
            advance(codes.values.shape[0] * blocks.context)
    contexts = Contexts(examples.choose(), blocks.context)
    for first, codes in kept:
        contexts.fill_windows(first, len(codes.values), _entries(first, codes))

    n_tokens = len(blocks.tokens) * (blocks.context - FIRST)
    rows = _unit_rows(module, layer, n_tokens, activity, examples.top.value[:, 0])
    texts = TokenTexts(model)
    metrics = {"analysed_tokens": n_tokens, "analysed_dead_share": float((activity.count == 0).mean())}
    with AtlasWriter(out, about_atlas(module, model, layer, blocks, seed)) as atlas:
        atlas.append("units", rows)
        for examples in contexts.example_rows(rows["unit_id"], blocks, texts):
            atlas.append("examples", examples)
        atlas.append_metrics(layer, module.KIND, metrics)
    return Atlas(out)


@torch.no_grad()
def _encode(module: Transcoder, model: Model, site: str, blocks: TokenBlocks, first: int, size: int) -> Codes:
    x = model.run(blocks.tokens[first : first + size], read=(site,))[site].to(module.W_enc.dtype)
    refuse_non_finite(x, site, torch.arange(first, first + len(x)))
    codes = module.encode(x)
    return Codes(codes.values.float().cpu(), codes.features.to(torch.int32).cpu())


def _entries(first: int, codes: Codes, since: int = 0) -> Entries:
    return entries_of(codes, np.arange(first, first + len(codes.values)), since)


def _unit_rows(
    module: Transcoder, layer: int, n_tokens: int, activity: Activity, strongest: NDArray[np.float32]
) -> dict[str, Any]:
    n = module.n_units
    return {
        "unit_id": [Unit("feature", layer, index).id for index in range(n)],
        "kind": [module.KIND] * n,
        "layer": np.full(n, layer),
        "index": np.arange(n),
        **activity_columns(activity, n_tokens, strongest),
        "decoder_norm": module.decoder_norms().detach().float().cpu().numpy(),
    }


def _place(module: Transcoder, model: Model, blocks: TokenBlocks) -> tuple[int, str]:
    """Layer and input site of the dictionary, once it is known to belong to the model."""
    name = module.provenance.get("model", model.name)
    if name != model.name:
        raise ClearheadError(f"the {module.KIND} was trained on {name}, not {model.name}; load that model")
    if module.config.d_in != model.d_model:
        raise ClearheadError(
            f"the {module.KIND} reads {module.config.d_in} dimensions, {model.name} has {model.d_model}"
        )
    if not len(blocks.tokens):
        raise ClearheadError("there are no token blocks to analyse; give more text or a shorter context")
    missing = [key for key in ("layer", "input_site") if key not in module.provenance]
    if missing:
        raise ClearheadError(
            f"the {module.KIND} does not say its {' and '.join(missing)}; add to its provenance, as layer 3 and "
            f"input_site mlp_in.3"
        )
    return int(module.provenance["layer"]), str(module.provenance["input_site"])
