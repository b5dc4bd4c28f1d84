"""Why a head has its verdict: a few sentences made of its row in `spectra` and its rows in `controls`."""

from collections.abc import Sequence

from clearhead.atlas.read import Row
from clearhead.view.spectral_explanations import JUDGED_BY, TOO_FEW

LEVEL = 0.05
"""The level that verdicts use for the corrected p."""
BY_INTERVAL = ("subspace", "untrained")
"""Controls with too few draws for a q by design: the interval of the difference alone decides."""


def give_reasons(head: Row, controls: Sequence[Row]) -> list[str]:
    """What was counted, how S stands against every control, how much cancels, and what to be careful about."""
    return [*_counted(head), *_separation(head, controls), *_made_of(head), *_cautions(head)]


def _counted(head: Row) -> list[str]:
    firings, sinks = head["n_firings"], head["n_sink"]
    if not firings + sinks:
        return ["No query gave one key more than the threshold of its attention, so there is nothing to decompose."]
    if not firings:
        return [f"{_count(sinks)}, all on the first token and left out, so no number is given."]
    left_out = f"; {sinks:,} more on the first token left out" if sinks else ""
    return [f"{_count(firings)} measured{left_out}."]


def _count(n: int) -> str:
    return f"{n:,} firing{'' if n == 1 else 's'}"


def _separation(head: Row, controls: Sequence[Row]) -> list[str]:
    if head["sparsity"] is None:
        return []
    said = f"S is {head['sparsity']:.2f} on average"
    if head["verdict"] == TOO_FEW:
        return [f"{said}."]
    tested = [row for row in controls if row["q"] is not None or row["control"] in BY_INTERVAL]
    untested = [row for row in controls if row not in tested]
    missing = [name for name in JUDGED_BY if name not in {row["control"] for row in controls}]
    clauses = {
        "clearly lower than under": [_under(row) for row in tested if _separated(row)],
        "not clearly lower than under": [_under(row) for row in tested if not _separated(row)],
        "not tested against": [*map(_under, untested), *missing],
    }
    return [said + "".join(f", {words} {_listed(names)}" for words, names in clauses.items() if names) + "."]


def _separated(row: Row) -> bool:
    return row["low"] > 0 and (row["q"] is None or row["q"] <= LEVEL)


def _under(row: Row) -> str:
    return f"{row['control']} ({row['sparsity']:.2f})"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _made_of(head: Row) -> list[str]:
    if head["n_recon"] is None or head["cancellation"] is None:
        return []
    modes = f"{head['n_recon']:g} mode{'' if head['n_recon'] == 1 else 's'}"
    return [f"The typical firing is reached with {modes}, and Σ|c| is {head['cancellation']:.3g} times |Σc|."]


def _cautions(head: Row) -> list[str]:
    sentences = []
    if head["degenerate"]:
        sentences.append(
            f"{head['degenerate']} of {len(head['sigma'])} modes are too close to a neighbour to tell apart."
        )
    if head["rank"] < len(head["sigma"]):
        sentences.append(f"The query–key product has rank {head['rank']} of {len(head['sigma'])}.")
    return sentences
