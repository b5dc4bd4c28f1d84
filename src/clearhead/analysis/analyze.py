"""Analyse a Lorsa on text and write an atlas: what each head reads, writes, and when it is active.

    pass 1   every block once: x and original z from the model, codes from the Lorsa; activity, choice of examples,
             output shares
    pass 2   the same blocks: windows and z patterns of the examples; on some, the overlap with the original
             patterns and of the heads with each other. What pass 1 read is kept while it fits in `keep_bytes`; for
             the rest the model runs again, in the same batches, so the numbers are the same

and, without data, logit effects, weight shares and what weights say of the relations (relations.py). Fidelity is not
measured here (`training.evaluate`).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.analysis import shares as share
from clearhead.analysis.activity import Activity
from clearhead.analysis.contexts import Contexts
from clearhead.analysis.entries import Entries, entries_of
from clearhead.analysis.examples import ExampleCollector
from clearhead.analysis.families import PairOverlaps, family_rows, find_families
from clearhead.analysis.host_modes import host_modes
from clearhead.analysis.logits import logit_effects
from clearhead.analysis.looking import relate_looks, strongest_looks
from clearhead.analysis.neighbours import DirectPath, Neighbourhood
from clearhead.analysis.reads_writes import meet_neighbours, read_embeddings
from clearhead.analysis.relations import Related, relation_rows
from clearhead.analysis.score_parts import explain_heads, heads_named
from clearhead.analysis.token_texts import TokenTexts
from clearhead.analysis.unit_rows import head_rows, lorsa_rows
from clearhead.atlas.read import Atlas
from clearhead.atlas.write import AtlasWriter
from clearhead.data.harvest import refuse_non_finite
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.load import Dictionary
from clearhead.dictionaries.lorsa import Codes, Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.norms import unembedding
from clearhead.runs import progress

FIRST = 1
"""Positions before this are left out, as in the evaluation: at position 0 a token attends to nothing but itself."""
FAMILY_TOKENS = 4096
"""Tokens on which the patterns of heads are compared with each other."""
SCALE_BLOCKS = 4
"""Blocks over which the scale of norms is averaged."""


def analyze(
    lorsa: Lorsa,
    model: Model,
    layer: int,
    blocks: TokenBlocks,
    out: str | Path,
    *,
    dictionaries: Mapping[str, Dictionary] | None = None,
    strict: bool = True,
    explained: str | None = None,
    top: int = 16,
    quantiles: int = 8,
    negatives: int = 4,
    routing_tokens: int = 8192,
    batch_blocks: int = 8,
    keep_bytes: int = 2**30,
    seed: int = 0,
    evaluation: Mapping[str, Any] | None = None,
) -> Atlas:
    """Analyse every head of `lorsa` over all of `blocks` and write the atlas `out`, replacing an earlier one.

    dictionaries: by name, SAEs, transcoders and Lorsas of other places of the model, which the heads read or which
    read the heads; `strict` refuses others, else they are left out. explained: heads whose scores are split exactly
    (`score_parts.heads_named`). top, quantiles, negatives: examples per head of each category. routing_tokens:
    tokens on which patterns are compared with the original heads', and on some of them with each other. keep_bytes:
    memory for what pass 1 read. evaluation: metrics of `training.evaluate`, for the table `layers` (its numbers and
    lists of numbers are taken).

    Raises `ClearheadError` when Lorsa, model, layer and dictionaries do not belong together or there are no blocks, and
    `NonFiniteError` naming site, block and position.
    """
    _check(lorsa, model, layer, blocks)
    neighbourhood = Neighbourhood(model, layer, dictionaries or {}, strict=strict)
    if explained is not None:
        heads_named(explained, lorsa.n_heads, np.zeros(lorsa.n_heads))  # refuses before the work
    was_training = lorsa.training
    lorsa.eval()
    units = _Units(_Reading(lorsa, model, layer, blocks, batch_blocks, keep_bytes), top, quantiles, negatives, seed)
    contexts, routing, overlaps = units.revisit(routing_tokens)
    lorsa.train(was_training)

    texts = TokenTexts(model)
    weights = model.weights(layer)
    write = lorsa.W_O.detach()
    output = units.output.coefficients(write, weights.W_O)
    coefficients = {
        "output": output,
        "weights": share.weight_coefficients(lorsa, weights),
        "routing": routing.coefficients(),
    }
    shares = {name: share.shares(values.cpu()) for name, values in coefficients.items()}
    control = share.shares(units.output.coefficients(share.shuffled(write, seed), weights.W_O))
    W_U, _ = unembedding(model)
    n_tokens = len(blocks.tokens) * (blocks.context - FIRST)
    rows = lorsa_rows(
        lorsa,
        layer,
        n_tokens,
        units.activity,
        units.strongest,
        logit_effects(write, W_U.detach().to(write)),
        shares,
        texts,
    )
    metrics = _numbers(evaluation or {}) | _spanning({**shares, "output_shuffled": control})
    metrics |= {"analysed_tokens": n_tokens, "analysed_dead_share": float((units.activity.count == 0).mean())}
    entries = about_atlas(lorsa, model, layer, blocks, seed)
    looks = strongest_looks(contexts, blocks.tokens.numpy())
    related = [
        read_embeddings(lorsa, model, layer, texts),
        *_meet(lorsa, neighbourhood, blocks),
        *relate_looks(looks, blocks.tokens.numpy(), model.d_vocab, texts),
        host_modes(lorsa, model, layer, coefficients["routing"]),
    ]
    if explained is not None:
        heads = heads_named(explained, lorsa.n_heads, units.activity.count)
        related += explain_heads(lorsa, neighbourhood, contexts.chosen, blocks.tokens.numpy(), heads, texts)
    families = find_families(overlaps, lorsa)
    with AtlasWriter(out, entries) as atlas:
        atlas.append("units", rows)
        atlas.append("units", head_rows(model, layer))
        for examples in contexts.example_rows(rows["unit_id"], blocks, texts):
            atlas.append("examples", examples)
        atlas.append("patterns", contexts.pattern_rows(rows["unit_id"]))
        atlas.append("relations", relation_rows(rows["unit_id"], related))
        atlas.append("families", family_rows(families, layer, rows["unit_id"], looks, texts))
        atlas.append_metrics(layer, "lorsa", metrics)
    return Atlas(out)


class _Reading:
    """The batches of a pass: consecutive blocks with the layer's input and the Lorsa's codes, kept while they fit."""

    def __init__(self, lorsa: Lorsa, model: Model, layer: int, blocks: TokenBlocks, batch_blocks: int, keep_bytes: int):
        self.lorsa, self.model, self.layer, self.blocks = lorsa, model, layer, blocks
        self.step, self.room = batch_blocks, keep_bytes
        self._kept: dict[int, tuple[Tensor, Codes]] = {}

    @torch.no_grad()
    def compute(self, first: int) -> tuple[Tensor, Tensor, Codes]:
        """(x, original z, codes) of the batch that starts at block `first`."""
        site, z = f"attn_in.{self.layer}", f"z.{self.layer}"
        run = self.model.run(self.blocks.tokens[first : first + self.step], read=(site, z))
        x = run[site].to(self.lorsa.W_V.dtype)
        refuse_non_finite(x, site, torch.arange(first, first + len(x)))
        return x, run[z], self.lorsa.encode(x)

    def starts(self) -> range:
        return range(0, len(self.blocks.tokens), self.step)

    def first_pass(self) -> Iterator[tuple[int, Codes, Tensor]]:
        """(first block, codes, original z) of every batch."""
        with progress("activity", self.blocks.tokens.numel()) as advance:
            for first in self.starts():
                x, z, codes = self.compute(first)
                kept = (x.cpu(), Codes(codes.values.cpu(), codes.heads.to("cpu", torch.int32)))
                size = sum(part.numel() * part.element_size() for part in (kept[0], *kept[1]))
                if size <= self.room:
                    self.room -= size
                    self._kept[first] = kept
                yield first, codes, z
                advance(x.shape[0] * x.shape[1])

    def second_pass(self) -> Iterator[tuple[int, Tensor, Codes]]:
        """(first block, x, codes) of every batch; what was kept is let go."""
        with progress("contexts", self.blocks.tokens.numel()) as advance:
            for first in self.starts():
                if first in self._kept:
                    x, codes = self._kept.pop(first)
                else:
                    x, _, codes = self.compute(first)
                yield first, x.to(self.model.device), codes
                advance(x.shape[0] * x.shape[1])


class _Units:
    """Everything pass 1 accumulates."""

    def __init__(self, reading: _Reading, top: int, quantiles: int, negatives: int, seed: int):
        lorsa, blocks = reading.lorsa, reading.blocks
        weights = reading.model.weights(reading.layer)
        self.reading, self.lorsa = reading, lorsa
        self.activity = Activity(lorsa.n_heads, signed=lorsa.config.activation == "signed-topk")
        self.examples = ExampleCollector(
            lorsa.n_heads,
            len(blocks.tokens),
            blocks.context,
            top=top,
            quantiles=quantiles,
            negatives=negatives,
            first=FIRST,
            seed=seed,
        )
        self.output = share.OutputShares(lorsa.n_heads, len(weights.W_O), weights.W_O.shape[1])
        for first, codes, z in reading.first_pass():
            entries = entries_of(codes, np.arange(first, first + len(z)), FIRST)
            self.activity.update(entries)
            self.examples.update(entries)
            self.output.update(entries, entries.token - first * blocks.context, z.flatten(0, 1))
        self.strongest = self.examples.top.value[:, 0]

    def revisit(self, routing_tokens: int) -> tuple[Contexts, share.RoutingShares, PairOverlaps]:
        """Pass 2; patterns are compared on whole batches spread evenly through the data."""
        reading, context = self.reading, self.reading.blocks.context
        contexts = Contexts(self.examples.choose(), context)
        original = from_attention(reading.model.weights(reading.layer), reading.model.geometry(reading.layer))
        original = original.to(reading.lorsa.W_V.dtype)
        routing = share.RoutingShares(self.lorsa.n_heads, self.lorsa.config.pattern_size, original.config.n_patterns)
        overlaps = PairOverlaps(self.lorsa.n_heads)
        starts = list(reading.starts())
        compared = _spread(starts, routing_tokens / (reading.step * context))
        related = set(_spread(compared, FAMILY_TOKENS / (reading.step * context)))
        for first, x, codes in reading.second_pass():
            entries = entries_of(codes, np.arange(first, first + len(x)))
            contexts.fill(first, x, entries, self.lorsa)
            if first in compared:
                self._compare_patterns(routing, overlaps if first in related else None, first, x, entries, original)
        return contexts, routing, overlaps

    @torch.no_grad()
    def _compare_patterns(
        self,
        routing: share.RoutingShares,
        overlaps: PairOverlaps | None,
        first: int,
        x: Float[Tensor, "b t d"],
        entries: Entries,
        original: Lorsa,
    ) -> None:
        block, position = np.divmod(entries.token, x.shape[1])
        for b, one in enumerate(x.split(1)):  # a block's patterns at a time
            here = (block == first + b) & (position >= FIRST)
            mine, patterns = entries.where(here), self.lorsa.patterns(one)
            routing.update(mine, position[here], patterns, original.patterns(one))
            if overlaps is not None:
                size = self.lorsa.config.pattern_size
                overlaps.update(mine, position[here], patterns[0], self.lorsa.values(one)[0], size, FIRST)


def _spread(starts: list[int], count: float) -> list[int]:
    """About `count` of the starts, at least one, spread evenly."""
    wanted = min(len(starts), max(1, round(count)))
    return [starts[i * len(starts) // wanted] for i in range(wanted)]


def _meet(lorsa: Lorsa, neighbourhood: Neighbourhood, blocks: TokenBlocks) -> list[Related]:
    """Reads and writes of other dictionaries' units; no forward where there are none."""
    if not neighbourhood.neighbours:
        return []
    sample = blocks.tokens[:SCALE_BLOCKS]
    return meet_neighbours(lorsa, neighbourhood, DirectPath(neighbourhood.model, sample, FIRST, neighbourhood.places))


def _spanning(shares: Mapping[str, Tensor]) -> dict[str, float]:
    """Fraction of heads that span several original heads, by formula, with intervals and the control."""
    metrics: dict[str, float] = {}
    for name, values in shares.items():
        found = share.spanning_fraction(values)
        if found is not None:
            metrics |= {
                f"spanning_{name}": found.fraction,
                f"spanning_{name}_low": found.low,
                f"spanning_{name}_high": found.high,
                f"spanning_{name}_heads": found.n_heads,
            }
    return metrics


def _numbers(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among the metrics; words and what could not be measured (None) have no row."""
    numbers: dict[str, Any] = {}
    for name, value in evaluation.items():
        parts = value if isinstance(value, list) else [value]
        if name != "layer" and all(isinstance(part, int | float) for part in parts):
            numbers[name] = value
    return numbers


def about_atlas(module: Dictionary, model: Model, layer: int, blocks: TokenBlocks, seed: int) -> dict[str, Any]:
    """What `atlas.json` says of the model, the text and the dictionary that were analysed."""
    return {
        "model": model.name,
        "model_note": model.note,
        "layer": layer,
        "text": blocks.source,
        "text_split": blocks.split,
        "text_sha256": blocks.sha256,
        "tokens": blocks.tokens.numel(),
        "context": blocks.context,
        "first_position": FIRST,
        "seed": seed,
        "dictionary": {"kind": module.KIND, **dataclasses.asdict(module.config), "provenance": module.provenance},
    }


def _check(lorsa: Lorsa, model: Model, layer: int, blocks: TokenBlocks) -> None:
    if lorsa.config.d_model != model.d_model:
        raise ClearheadError(
            f"the Lorsa reads {lorsa.config.d_model} dimensions and {model.name} has {model.d_model}; "
            f"give the model it was trained on ({lorsa.provenance.get('model', 'not recorded')})"
        )
    name = lorsa.provenance.get("model", model.name)
    if name != model.name:
        raise ClearheadError(
            f"the Lorsa was trained on {name}, not {model.name}; load that model, or pass it on as "
            f"Model(..., name={name!r}) if it is the same under another name"
        )
    trained = lorsa.provenance.get("layer", layer)
    if trained != layer:
        raise ClearheadError(f"the Lorsa was trained on layer {trained}, not {layer}; give layer={trained}")
    if not len(blocks.tokens):
        raise ClearheadError("there are no token blocks to analyse; give more text or a shorter context")
