"""Why a head has its verdict: a few sentences made of its row in `spectra` and its rows in `controls`."""

from collections.abc import Sequence

from clearhead.atlas.read import Row

LEVEL = 0.05
"""The level that verdicts use for the corrected p."""


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
    below = [row for row in controls if _separated(row)]
    level = [row for row in controls if not _separated(row)]
    clauses = [f"clearly lower than under {_listed(below)}"] if below else []
    clauses += [f"not clearly lower than under {_listed(level)}"] if level else []
    return [f"S is {head['sparsity']:.2f} on average" + "".join(f", {clause}" for clause in clauses) + "."]


def _separated(row: Row) -> bool:
    return row["low"] > 0 and (row["q"] is None or row["q"] <= LEVEL)


def _listed(controls: Sequence[Row]) -> str:
    parts = [f"{row['control']} ({row['sparsity']:.2f})" for row in controls]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


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
