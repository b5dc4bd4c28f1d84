"""Sentences and explanations of the page of inclusion curves: the protocol in words, the outcome in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.view.sparse_words import share

Numbers = Mapping[str, Any]

HELP: dict[str, str] = {
    "inclusion": (
        "F(k) = (M(C) − M(∅)) / (M(V) − M(∅)) where C are the k components that the ranking puts first, all others "
        "overwritten. ▽ marks the first crossing of the threshold, ◆ the count from which F stays above it. Bands: "
        "95 % over resampled prompts. F may pass 1 where components that speak against the answer are left out."
    ),
    "other_metrics": (
        "The same circuits by every metric, each scaled so that the empty circuit is 0 and the whole model is 1. KL is "
        "minus the divergence from the whole model."
    ),
    "per_prompt": (
        "The stable crossing of every prompt alone. Wide: the circuit of the mean is not that of a prompt. Never: the "
        "prompt's own effect is reversed, or its curve ends below the threshold."
    ),
    "ranking": (
        "What each head is worth to the behaviour by this ranking, with its place where that is 99 or less. Blue "
        "helps the answer, red speaks against it."
    ),
    "order": "Heads of the stable circuit, the darker the earlier they come in the ranking; others are blank.",
    "stable": "The smallest evaluated count from which on F stays at the threshold or above.",
    "first": "The smallest evaluated count whose F reaches the threshold; it may be an overshoot.",
    "interval": "Percentile bootstrap, 95 %: prompts, or whole templates, are drawn again with replacement.",
    "auc": "Area under F over shares of the components.",
    "cpr": "MIB's circuit performance ratio: area under F at MIB's shares. For signed rankings; larger is better.",
    "cmd": "MIB's circuit-model distance: area between F and 1. For absolute rankings; smaller is better.",
    "complement_f": "F of everything but the stable circuit. Near 0: the circuit is necessary as well as sufficient.",
    "tied": "Components that share the score at the cut. With 1 the circuit is unambiguous.",
    "max_f": "The largest F, and at which count.",
    "protocol": "Everything that a circuit's size depends on. A count without its protocol means nothing.",
    "left_out": "Prompts that are in no average: wrong, too weak, or refused by the tokenizer.",
    "prompts": "Each evaluated prompt: its item in the task, its template, M with no and with all components.",
    "overlap": "Components in both stable circuits, of those in either (Jaccard).",
}

ABLATIONS: dict[str, str] = {
    "corrupt": "what they compute on the corrupt prompt",
    "zero": "zeros",
    "mean": "their mean over prompts and positions",
    "positional_mean": "their mean over prompts at each position",
    "resample": "what they compute on another prompt",
    "optimal": "a constant learned to harm least",
}
RANKINGS: dict[str, str] = {
    "exact": "the measured effect of overwriting each alone",
    "atp": "attribution patching, one backward pass",
    "ig": "integrated gradients from nothing kept to all kept",
    "relevance": "attribution through the model linearised by relevance rules",
    "mask": "a learned mask",
    "random": "lot",
}


def things(level: str) -> str:
    """What the components of a level are called in a sentence."""
    return {"heads+mlps": "heads and MLPs"}.get(level, level.replace("-", " "))


def protocol_words(protocol: Numbers) -> list[str]:
    """The protocol as sentences; the table beside them has every entry."""
    what = things(protocol["level"])
    ablation = ABLATIONS.get(protocol["ablation"].replace(" ", "_"), protocol["ablation"])
    ranked, evaluated = len(protocol["ranked_on"]), len(protocol["evaluated_on"])
    where = f"on {ranked} prompts" if ranked else "on the evaluated prompts themselves"
    metric = protocol["metric"].replace("_", " ")
    said = [
        f"Task {protocol['task']}, model {protocol['model']}. Components are {what}, in number "
        f"{protocol['components']}. "
        f"Those outside a circuit are overwritten with {ablation}; those inside are computed again from whatever "
        "reaches them.",
        f"The ranking was made {where}, circuits were evaluated on {evaluated} prompts by {metric}; a circuit must "
        f"keep {share(protocol['threshold'])} of M(all) − M(none).",
    ]
    left = [
        (len(protocol["wrong"]), "that the whole model gets wrong"),
        (len(protocol["dropped"]), f"whose effect is below {protocol['min_effect']:g}"),
        (sum(protocol["refused"].values()), "that the tokenizer cannot take"),
    ]
    parts = [f"{count} {words}" for count, words in left if count]
    said.append(f"Left out: {', '.join(parts)}." if parts else "No prompt was left out.")
    return said + [str(note) for note in protocol["notes"]]


def outcome_words(name: str, curve: Numbers, n: int, what: str) -> str:
    """What one curve says, with its intervals."""
    stable, first, threshold = curve["stable"], curve["first"], share(curve["threshold"])
    if stable is None:
        reached = "never reaches it" if first is None else f"reaches it with {first:,} and does not stay"
        return f"{name}: {threshold} asked, F {reached}; the largest F is {curve['max_f']:.2f}."
    spans = [
        f"{interval_words(curve[f'intervals_{over}']['stable'])} over {over}"
        for over in ("prompts", "templates")
        if curve[f"intervals_{over}"]["stable"] is not None
    ]
    inner = f" (95 %: {', '.join(spans)})" if spans else ""
    said = f"{name}: {stable:,} of {n:,} {what} ({share(stable / n + 1e-9)}) keep {threshold} of the behaviour{inner}"
    said += "." if first == stable else f"; {first:,} reach it first."
    if curve["complement_f"] is not None:
        said += f" Everything else keeps {share(curve['complement_f']).replace('-', '−')}."
    return said


def random_words(curves: Sequence[Numbers]) -> str:
    """What random rankings need, in one sentence; empty without any."""
    crossings = [curve["stable"] for curve in curves if curve["rank"] == "random"]
    if not crossings:
        return ""
    written = ", ".join("never" if count is None else f"{count:,}" for count in crossings)
    return f"Random rankings, for comparison: {written}."


def interval_words(interval: Sequence[float] | None) -> str:
    """`18–31`; a dash where there is none."""
    if interval is None:
        return "–"
    low, high = interval
    if low == high:
        return f"{low:,.4g}"
    whole = float(low).is_integer() and float(high).is_integer()
    return f"{low:,.0f}–{high:,.0f}" if whole else f"{low:.3g}–{high:.3g}".replace("-", "−")
