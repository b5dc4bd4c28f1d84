"""`clearhead explain`: units of an atlas in words, and how well the words tell active from silent examples.

Writes the atlas' table `explanations`; the run directory holds `answers.jsonl` (every answer of a model, so that none
is asked for twice) and `summary.json`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.atlas import Atlas
from clearhead.commands.printing.table import say, show, spelled
from clearhead.commands.view import atlas_of
from clearhead.config import Explain
from clearhead.config.explain import LOCAL, NONE, TEMPLATE
from clearhead.configfile import refuse_other_verb
from clearhead.errors import ClearheadError
from clearhead.explain.answers import Answers, Spending
from clearhead.explain.compare import ALPHA, Comparison, compare_units, count_results, scores_in
from clearhead.explain.endpoint import Endpoint
from clearhead.explain.evidence import explainable
from clearhead.explain.explain import Explainer, Judge, explain_units, summarise, write_explanations
from clearhead.explain.language_model import ModelExplainer, ModelJudge
from clearhead.explain.local import LocalExplainer, LocalJudge, LocalModel
from clearhead.explain.questions import SCORERS, Scorer
from clearhead.explain.template import Explanation, TemplateExplainer, TemplateJudge
from clearhead.model.access import Model
from clearhead.runs import RunDirectory

UNKNOWN = Explanation("x" * 150)
"""Stands for an explanation not yet written when a dry run counts what judging it takes."""


class _Roles(NamedTuple):
    """Who does what, and where it is written down."""

    explainer: Explainer
    judge: Judge | None
    answers: Answers
    spending: Spending


def plan(config: Explain) -> dict[str, Any]:
    """What would be asked and what it would cost, without asking."""
    atlas = Atlas(atlas_of(config.run))
    roles = _roles(config, sending=False)
    units = choose_units(atlas, config)
    judged = roles.judge.name if roles.judge is not None else None
    rows: dict[str, Any] = {"atlas": atlas.path, "units": len(units), "explainer": roles.explainer.name}
    rows |= {"judge": judged, "scorers": ", ".join(config.scorers) if judged else None, "directory": _directory(config)}
    if not {config.explainer, config.judge_name()} - {TEMPLATE, NONE}:
        return rows | {"requests": 0}
    explain_units(atlas, units, roles.explainer, roles.judge, _scorers(config), seed=config.seed, unknown=UNKNOWN)
    spending, answers = roles.spending, roles.answers
    size = f"{answers.bytes_per_token:.2f} bytes per token"
    how = f"{size}, as counted in answers.jsonl" if answers.counted else f"estimated at {size}"
    rows |= {
        "requests": spending.requests,
        "answered already": spending.cached,
        "prompt tokens": f"{spending.prompt_tokens:,.0f} ({how})",
        "tokens of answers": f"{spending.completion_tokens:,.0f} at most",
        "cost": "give --price-in and --price-out" if spending.cost is None else f"{spending.cost:,.4f} at most",
    }
    if config.local is None or config.explainer != LOCAL and config.judge_name() != LOCAL:
        rows["not counted"] = "repeated requests, where an answer makes no sense or none comes"
    return rows


def run(config: Explain) -> None:
    """Explain, score, write the atlas and the run directory, print the summary."""
    atlas = Atlas(atlas_of(config.run))
    other = None if config.against is None else Atlas(atlas_of(config.against))
    units = choose_units(atlas, config)
    scorers = _scorers(config)
    refuse_other_verb(_directory(config), config)
    with RunDirectory(_directory(config)) as directory:
        directory.write_config(config.to_dict())
        roles = _roles(config, sending=True)
        name = roles.judge.name if roles.judge is not None else None
        others = None if other is None else scores_in(other, roles.explainer.name, str(name))
        asked = {config.explainer, config.judge_name()} - {TEMPLATE, LOCAL, NONE}
        try:
            explained, reason = explain_units(
                atlas,
                units,
                roles.explainer,
                roles.judge,
                scorers,
                seed=config.seed,
                parallel=config.parallel if asked else 1,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; the answers so far are in {roles.answers.path}, and the same command goes on from there"
            ) from None
        written = write_explanations(atlas, roles.explainer.name, name, explained)
        spending = roles.spending
        summary = summarise(explained, scorers if name else (), config.seed) | {
            "explainer": roles.explainer.name,
            "judge": name,
            "stopped": reason or None,
            "requests": spending.requests,
            "answered_already": spending.cached,
            "failed": spending.failed,
            "prompt_tokens": round(spending.prompt_tokens),
            "completion_tokens": round(spending.completion_tokens),
            "cost": spending.cost,
        }
        compared = []
        if others is not None and not reason:
            compared = compare_units(scores_in(written, roles.explainer.name, str(name)), others, seed=config.seed)
            summary |= {"against": str(other and other.path), "comparisons": [one._asdict() for one in compared]}
            summary |= count_results(compared)
        directory.write_summary(summary)
    show({key: value for key, value in summary.items() if key != "comparisons"}, f"explained in {written.path}")
    if others is not None and not reason:
        _show_comparisons(compared)
    if spending.failed:
        say(f"{spending.failed} asked in vain, the last: {spending.failure}")
    if reason:
        say(f"ended early: {reason}. What was explained is kept; the same command goes on from there")


def _show_comparisons(compared: list[Comparison]) -> None:
    if not compared:
        say("no layer has enough scored units on both sides to compare")
    for one in compared:
        say(
            f"  layer {one.layer}, {one.scorer}: {one.result} ({one.units} units a side, {spelled(one.mean)} against "
            f"{spelled(one.other_mean)}, difference {one.low:+.3f} to {one.high:+.3f}, p = {one.p:.3g})"
        )
    say(f"  Mann-Whitney, two-sided, alpha = {ALPHA}")


def choose_units(atlas: Atlas, config: Explain) -> list[str]:
    """The units named, or `config.units` of each kind and layer at random; raises `ClearheadError` when none can be."""
    if config.unit:
        for unit_id in config.unit:
            atlas.unit(unit_id)
        can = set(explainable(atlas))
        cannot = [unit_id for unit_id in config.unit if unit_id not in can]
        if cannot:
            raise ClearheadError(f"{', '.join(cannot)} has too few active examples in {atlas.path} to be explained")
        return list(dict.fromkeys(config.unit))
    places: dict[str, list[str]] = {}
    for unit_id in explainable(atlas, config.kind):
        places.setdefault(unit_id.rpartition(".")[0], []).append(unit_id)
    chosen = []
    for number, units in enumerate(places.values()):
        drawn = np.random.default_rng([config.seed, number]).permutation(len(units))[: config.units]
        chosen += [units[place] for place in sorted(drawn)]
    return chosen


def _roles(config: Explain, *, sending: bool) -> _Roles:
    answers = Answers(_directory(config) / "answers.jsonl")
    limits = (config.max_requests, config.max_cost) if sending else (None, None)
    spending = Spending(config.price_in, config.price_out, *limits)

    def endpoint(name: str) -> Endpoint:
        assert config.endpoint is not None  # `Explain.validate`
        return Endpoint(config.endpoint, name, answers, spending, timeout=config.timeout, sending=sending)

    local = None
    if config.local is not None:
        name = config.local
        local = LocalModel(
            name,
            lambda: Model.load(name, dtype=config.dtype, device=config.device),
            answers,
            spending,
            sending=sending,
        )
    return _Roles(_explainer(config, local, endpoint), _judge(config, local, endpoint), answers, spending)


def _explainer(config: Explain, local: LocalModel | None, endpoint: Callable[[str], Endpoint]) -> Explainer:
    if config.explainer == TEMPLATE:
        return TemplateExplainer()
    if config.explainer == LOCAL and local is not None:
        return LocalExplainer(local)
    return ModelExplainer(endpoint(config.explainer))


def _judge(config: Explain, local: LocalModel | None, endpoint: Callable[[str], Endpoint]) -> Judge | None:
    name = config.judge_name()
    if name == NONE:
        return None
    if name == TEMPLATE:
        return TemplateJudge()
    if name == LOCAL and local is not None:
        return LocalJudge(local)
    return ModelJudge(endpoint(name))


def _scorers(config: Explain) -> tuple[Scorer, ...]:
    return tuple(scorer for scorer in SCORERS if scorer in config.scorers)


def _directory(config: Explain) -> Path:
    return config.out or atlas_of(config.run).parent / "explain"
