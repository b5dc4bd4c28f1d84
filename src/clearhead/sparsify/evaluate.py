"""What a sparse model is: everything that is measured on it, in one dictionary of stable keys that JSON takes.

Three forms of the model are compared on the same tokens and prompts: `hard` (its gates as it is used), `opened` (its
weights, all gates open) and `base` (the dense model it was trained from, None throughout where none is given).

    model, base, tokens, context      names, and how much text: `tokens` tokens in sequences of `context`
    ce              hard, opened, base; sampled: mean over seeds, sampled_by_seed        nats, over all predictions
    ce_by_position  [{first, last, hard, opened, base}]: predictions of tokens first..last of a sequence
    edges           share, expected_share (of visible pairs), per_query, expected_per_query, empty_rows, leak
    lengths         the same with `length`, for the first `length` positions of the sequences
    layers          the numbers of the layers that have gates, the order of all lists by layer
    by_layer        share, per_query, empty_rows, leak, distance
    by_head         share, per_query, distance: [layer][head]
    first_token     base, opened, before_gates, after_gates, empty_rows by layer        rows i ≥ 1, see edge_maps.py
    empty_tiles     {16, 32, 64, 128: share of tiles without an open edge by layer}
    controls        hard, random_sparse, top_probability_sparse, random_base, top_in_row_base, ...: see edge_controls.py
    laid_out_tokens the tokens that distances, first_token, empty_tiles and controls were measured on
    induction       hard, opened, base: {first_half, second_half}                        nats
    tasks           {name: {prompts, refused_prompts, hard, opened, base: {accuracy, mean_difference, top1}}}
    retrieval       {passkey, needle: [{length, depths, prompts, hard, opened, base: {exact, log_probability}}]}

`expected` is under σ(x), `leak` the softmax mass on closed edges, `per_query` the open edges of one head in one row.
A task or a length that the model or its tokenizer cannot take is {"refused": why} and in no average. Numbers of an
undefined mean (the distance of no edges) are None. Not here: anything trained, generation, files.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from clearhead.data.repeats import alphabet_of
from clearhead.data.retrieval import DEPTHS, Kind, measure_retrieval
from clearhead.data.tasks import TASKS, measure, task
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model.access import Model
from clearhead.model.gates import SETTINGS, Gates
from clearhead.model.loading import DType
from clearhead.sparsify.edge_controls import measure_controls
from clearhead.sparsify.edge_maps import first_token_shares, map_edges
from clearhead.sparsify.measures import Drawn, as_it_is, by_position, measure_induction, measure_losses

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BEHAVIOURS = ("ioi", "greater_than", "copy")
"""Tasks that are measured where none are named."""
KINDS: tuple[Kind, ...] = ("passkey", "needle")
DTYPES: dict[torch.dtype, DType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
Forms = dict[str, tuple[Model, Drawn] | None]
"""The models to compare by name, and the gates that each is measured under."""


def evaluate(
    model: Model,
    tokens: Int64[Tensor, "n t"],
    *,
    base: Model | None = None,
    lengths: Sequence[int] = LENGTHS,
    seeds: Sequence[int] = (0, 1, 2),
    laid_out_tokens: int = 8192,
    tasks: Sequence[str] = BEHAVIOURS,
    prompts: int = 128,
    retrieval_lengths: Sequence[int] = (),
    retrieval_prompts: int = 8,
    needle_text: str = "default",
    batch_tokens: int = 4096,
) -> dict[str, Any]:
    """Measures a model with gates on blocks of held-out text; see the module for the keys of what it returns.

    base: the dense model it was trained from, for comparison.
    lengths: where the edges are counted; those up to the sequences' own are used, and that one.
    seeds: of the sampled gates, and of the random control.
    laid_out_tokens: the text, rounded down to whole sequences but at least one, for what needs patterns laid out.
    tasks, prompts: behaviours (data/tasks.py) and prompts of each. retrieval_lengths, retrieval_prompts, needle_text:
    tokens of passkey and needle prompts, how many per depth, and the text that needles are hidden in.
    batch_tokens: tokens per forward.

    Raises `ClearheadError` for a model without gates, a base of another shape and sequences longer than the context,
    `UnknownNameError` for a task that does not exist, `NonFiniteError` for losses and logits that are no numbers.
    """
    gates = _check(model, base, tokens, lengths, seeds, tasks)
    context = tokens.shape[1]
    batch = max(1, batch_tokens // context)
    forms: Forms = {
        "hard": (model, lambda _: gates.hard()),
        "opened": (model, lambda _: gates.opened()),
        "base": None if base is None else (base, as_it_is),
    }

    measured = {
        name: None if form is None else measure_losses(form[0], tokens, form[1], batch=batch, what=f"{name} loss")
        for name, form in forms.items()
    }
    ce = {name: None if found is None else found[0] for name, found in measured.items()}
    assert measured["hard"] is not None
    edges = measured["hard"][1]
    sampled = [
        float(measure_losses(model, tokens, _sampled(gates, seed), batch=batch, what="sampled loss")[0].mean())
        for seed in seeds
    ]
    some = tokens[: max(1, laid_out_tokens // context)]
    maps = map_edges(model, some)
    first_token = {"base": None if base is None else first_token_shares(base, edges.layers, some)}
    with gates.opened():
        first_token["opened"] = first_token_shares(model, edges.layers, some)
    used = sorted({length for length in lengths if length < context} | {context})
    shares, per_query = edges.shares(), edges.per_row(edges.opened)
    return {
        "model": model.name,
        "base": None if base is None else base.name,
        "tokens": tokens.numel(),
        "context": context,
        "ce": {
            **{name: None if values is None else float(values.mean()) for name, values in ce.items()},
            "sampled": sum(sampled) / len(sampled),
            "sampled_by_seed": sampled,
        },
        "ce_by_position": by_position(ce),
        "edges": edges.summary(),
        "lengths": [{"length": length, **edges.summary(length)} for length in used],
        "layers": edges.layers,
        "by_layer": {
            "share": shares.mean(1).tolist(),
            "per_query": per_query.mean(1).tolist(),
            "empty_rows": edges.per_row(edges.empty).mean(1).tolist(),
            "leak": edges.per_row(edges.leak).mean(1).tolist(),
            "distance": maps["distance"]["by_layer"],
        },
        "by_head": {
            "share": shares.tolist(),
            "per_query": per_query.tolist(),
            "distance": maps["distance"]["by_head"],
        },
        "first_token": first_token | maps["first_token"],
        "empty_tiles": maps["empty_tiles"],
        "controls": measure_controls(model, base, some, shares, list(seeds)),
        "laid_out_tokens": some.numel(),
        "induction": measure_induction_of(model, forms, context, batch),
        "tasks": {name: measure_task(model, forms, name, prompts) for name in tasks},
        "retrieval": {
            kind: [
                _measure_retrieval(forms, kind, length, retrieval_prompts, needle_text, max(1, batch_tokens // length))
                for length in retrieval_lengths
            ]
            for kind in KINDS
        },
    }


def load_base(model: Model) -> Model | None:
    """The dense model that `model` says it was trained from, on its device, with its tokenizer; None if it names none.

    Raises what `Model.load` raises where that is not to be found.
    """
    name = getattr(model.hf.config, SETTINGS, {}).get("base")
    if name is None:
        return None
    base = Model.load(name, dtype=DTYPES[model.dtype], device=str(model.device), tokenizer=False)
    base.tokenizer = model.tokenizer
    return base


def _check(
    model: Model,
    base: Model | None,
    tokens: Tensor,
    lengths: Sequence[int],
    seeds: Sequence[int],
    tasks: Sequence[str],
) -> Gates:
    gates = model.gates
    if gates is None:
        raise ClearheadError(f"{model.name} is a dense model: it has no edge gates to evaluate; name a sparse one")
    for name in tasks:
        if name not in TASKS:
            raise UnknownNameError("task", name, TASKS)
    if base is not None:
        shapes = [(m.n_layers, m.n_heads, m.d_vocab) for m in (model, base)]
        if shapes[0] != shapes[1]:
            raise ClearheadError(
                f"base {base.name} has (layers, heads, vocabulary) {shapes[1]} and {model.name} {shapes[0]}; give the "
                "model that it was trained from"
            )
    if tokens.dim() != 2 or tokens.numel() == 0 or tokens.shape[1] < 4:
        raise ClearheadError(f"tokens: expected sequences [n, t] of at least 4 tokens, got {list(tokens.shape)}")
    if model.n_ctx is not None and tokens.shape[1] > model.n_ctx:
        raise ClearheadError(f"tokens: {tokens.shape[1]} positions, but the context of {model.name} is {model.n_ctx}")
    if not seeds or any(length < 1 for length in lengths):
        raise ClearheadError(f"expected at least one seed and lengths from 1 on, got {list(seeds)} and {list(lengths)}")
    return gates


def _sampled(gates: Gates, seed: int) -> Drawn:
    return lambda first: gates.sampled(seed, first)


def measure_induction_of(model: Model, forms: Forms, context: int, batch: int) -> dict[str, dict[str, float] | None]:
    """Random tokens of the tokenizer's ordinary ones, or of the whole vocabulary where there is no tokenizer."""
    alphabet = torch.arange(model.d_vocab) if model.tokenizer is None else alphabet_of(model.tokenizer)
    return {
        name: None if form is None else measure_induction(form[0], alphabet, context, form[1], batch=batch)
        for name, form in forms.items()
    }


def measure_task(model: Model, forms: Forms, name: str, prompts: int) -> dict[str, Any]:
    """Accuracy of each form on the same prompts, or why there are none."""
    try:
        behaviour = task(name, model, prompts)
    except ClearheadError as error:
        return {"refused": str(error)}
    refused = Counter(behaviour.refused.values())
    result: dict[str, Any] = {"prompts": len(behaviour), "refused_prompts": dict(refused)}
    for form_name, form in forms.items():
        if form is None:
            result[form_name] = None
            continue
        runner, drawn = form
        with drawn(0):
            found = measure(runner, behaviour)
        result[form_name] = {
            "accuracy": found.accuracy,
            "mean_difference": found.mean_difference,
            "top1": found.top1,
        }
    return result


def _measure_retrieval(forms: Forms, kind: Kind, length: int, prompts: int, text: str, batch: int) -> dict[str, Any]:
    """Exact match and log-probability by depth at one length, or why it cannot be had."""
    result: dict[str, Any] = {"length": length, "depths": list(DEPTHS), "prompts": prompts}
    for name, form in forms.items():
        if form is None:
            result[name] = None
            continue
        runner, drawn = form
        try:
            with drawn(0):
                found = measure_retrieval(runner, (length,), n=prompts, kind=kind, text=text, batch=batch)
        except NonFiniteError:
            raise
        except ClearheadError as error:
            return {"length": length, "refused": str(error)}
        result[name] = {"exact": found.exact[0].tolist(), "log_probability": found.log_probability[0].tolist()}
    return result
