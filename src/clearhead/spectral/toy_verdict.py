"""What the measures of a toy mean, in words: which of alignment, orthogonalisation and separation were reached."""

from typing import Literal

import torch

from clearhead.config.spectral_toy import ToySetting
from clearhead.spectral.toy_metrics import APART, Measures

Outcome = Literal["aligned and orthogonal", "aligned, not orthogonal", "partly aligned", "not aligned", "no head"]

ALIGNED = 0.95
ORTHOGONAL = 0.3
"""Largest overlap that still counts as orthogonal here: sizes with few spare dimensions leave some without harm."""
LEARNT = 0.8
"""Share of the target logit from which a pair counts as learnt."""


def outcome(setting: ToySetting, measures: Measures) -> Outcome:
    """The toy in one phrase."""
    if setting.attention_weight == 0:
        return "no head"
    share = float((measures.aligned >= ALIGNED).double().mean())
    if share < 1:
        return "partly aligned" if share else "not aligned"
    freed = bool((measures.overlap <= ORTHOGONAL).all() and (measures.ratio >= LEARNT).all())
    return "aligned and orthogonal" if freed else "aligned, not orthogonal"


def verdict(setting: ToySetting, measures: Measures) -> list[str]:
    """The toy in sentences, each about one thing that its numbers do or do not show."""
    m = measures
    if setting.attention_weight == 0:
        return [
            f"No head was trained: the {setting.features} features spread over {m.all_dim:.1f} of {setting.width} "
            f"dimensions; the singular vectors are those of the start (cosine {float(m.aligned.max()):.2f} at best)."
        ]
    sentences = [_alignment(m)]
    for sentence in (
        _orthogonality(setting, m),
        _unlearnt(setting, m),
        _narrow(setting, m),
        _close(m),
        _dead(setting, m),
    ):
        if sentence:
            sentences.append(sentence)
    return sentences


def _alignment(m: Measures) -> str:
    aligned, pairs = int((m.aligned >= ALIGNED).sum()), len(m.targets)
    if pairs == 1:
        mode = "The leading mode" if int(m.mode[0]) == 0 else f"Mode {int(m.mode[0])}"
        said = "points along" if aligned else "comes closest to, but does not point along,"
        return f"{mode} {said} the pair (cosines {float(m.query[0]):.3f} and {float(m.key[0]):.3f})."
    return (
        f"{aligned} of {pairs} pairs have a mode along both their features (smallest cosine "
        f"{float(m.aligned.min()):.3f})."
    )


def _orthogonality(setting: ToySetting, m: Measures) -> str:
    if bool(((m.overlap <= ORTHOGONAL) & (m.ratio >= LEARNT)).all()):
        return (
            f"Their features are orthogonal to all others to within {float(m.overlap.max()):.3f}; those spread over "
            f"{m.others_dim:.1f} of the {setting.width - 2 * setting.pairs} dimensions that are left."
        )
    sharing = (m.aligned >= ALIGNED) & ((m.overlap > ORTHOGONAL) | (m.ratio < LEARNT))
    if not bool(sharing.any()) or setting.head_width < setting.pairs:
        return ""
    worst = int(torch.where(sharing, m.overlap, -1).argmax())
    antipodal = bool(m.opposite[worst]) and float(m.overlap[worst]) > 0.9
    share = "shares its dimensions" if len(m.targets) == 1 else f"{int(sharing.sum())} aligned pairs share dimensions"
    return (
        f"Alignment is not orthogonalisation: {'it ' * (len(m.targets) == 1)}{share} with other features. Pair {worst} "
        f"has {'an antipodal partner' if antipodal else 'a neighbour'}, feature {int(m.partner[worst])} (overlap "
        f"{float(m.overlap[worst]):.2f}), and its logit is {float(m.ratio[worst]):.2f} of the target. An attention "
        f"weight of {setting.attention_weight:g} does not pay for dimensions of their own; raise --attention-weight."
    )


def _unlearnt(setting: ToySetting, m: Measures) -> str:
    late = (m.aligned < ALIGNED) & (m.ratio < LEARNT) & (m.mode >= 0)
    if not bool(late.any()):
        return ""
    return (
        f"Of the pairs that are not aligned, {int(late.sum())} have a logit below {LEARNT} of the target: "
        f"{setting.steps} steps at an attention weight of {setting.attention_weight:g} were too little; raise --steps "
        f"or --attention-weight."
    )


def _narrow(setting: ToySetting, m: Measures) -> str:
    if setting.head_width >= setting.pairs:
        return ""
    without = (m.mode < 0).nonzero()[:, 0].tolist()
    listed = ", ".join(f"{pair} ({float(m.aligned[pair]):.2f})" for pair in without)
    return (
        f"The head is narrower than the number of pairs ({setting.head_width} < {setting.pairs}): pairs {listed} have "
        f"no mode of their own; in brackets the smaller cosine with the mode they share most."
    )


def _close(m: Measures) -> str:
    close = (m.together > 1) & (m.ratio >= LEARNT)
    if not bool(close.any()):
        return ""
    return (
        f"The modes of {int(close.sum())} pairs lie within {APART} times the error ({m.error:.2g}) of a neighbour, so "
        f"nothing keeps their single vectors apart; the span of the leading modes contains their features to "
        f"{float(m.contained[close].min()):.3f}."
    )


def _dead(setting: ToySetting, m: Measures) -> str:
    if m.live == setting.width:
        return ""
    effective = float(torch.minimum(m.effective_query, m.effective_key).min())
    return (
        f"Tokens reach {m.live} of {setting.width} dimensions; in the others Ω keeps its start, which no logit shows. "
        f"Without them the smallest cosine is {effective:.3f} instead of {float(m.aligned.min()):.3f}."
    )
