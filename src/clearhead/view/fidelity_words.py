"""What the page of a fidelity report says: explanations behind the question marks, and its sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

Numbers = Mapping[str, Any]
LABELS = {
    "lorsa": "Lorsa",
    "sae": "SAE",
    "transcoder": "transcoder",
    "reference": "reference init",
    "seed": "other seed",
}
HELP: dict[str, str] = {
    "fvu": (
        "Σ‖y − ŷ‖² / Σ‖y − ȳ‖² on held-out tokens from position 1 on; massive tokens (outputs tens of times as long as "
        "the median token's) left out where the layer has any. 0 is perfect, 1 as good as the mean."
    ),
    "by_layer": (
        "Fraction of variance unexplained in every layer: the layer's Lorsa (blue), and beside it an SAE on the "
        "attention output (amber), a transcoder from attention input to output, which sees no other token (teal), and "
        "a Lorsa started as the reference implementation documents it (red). Open symbols: other budgets."
    ),
    "parameters": (
        "FVU against parameters, everything else equal. A line is a fit a N^−b + c, drawn only between measured sizes; "
        "series without one do not carry it (three sizes at least, falling, and near the curve)."
    ),
    "k": "FVU against active units per token (K), everything else equal; lines as in the chart of parameters.",
    "overlap": (
        "Do Lorsa and SAE miss the same? Correlation of squared error lengths over tokens; cosine of error vectors; "
        "the same cosine with the SAE's error taken at another token; R² on unseen blocks of a linear map from the "
        "layer's input, and from the SAE's error, to the Lorsa's error."
    ),
    "correlation": "Pearson correlation over tokens of ‖e‖² of the Lorsa and of the SAE.",
    "relative": "Rank correlation of ‖e‖² / ‖y‖²: without it, long outputs alone make errors agree.",
    "cosine": "Mean over tokens of the cosine between the two error vectors.",
    "shuffled": "The same with the SAE's error at another token: what unrelated errors give.",
    "r2_input": "Share of the error that a linear map from attn_in predicts on blocks it was not fitted on.",
    "r2_partner": "Share of the error that a linear map from the SAE's error predicts on blocks it was not fitted on.",
    "inside": (
        "Share of the squared error inside the span of what the original heads wrote at that token: wrong amounts "
        "of it. The rest was invented: no head wrote in those directions there."
    ),
    "inside_other": "The same for the span at another token: what directions without relation to the token hold.",
    "heads": (
        "What each original head adds to the output (grey) against its share of the error (colour); both sum to 1. A "
        "head with more of the error than of the output is reproduced worse than the others."
    ),
    "unexplained": "Which part of what the head adds to the output is missing from the prediction.",
    "positions": "√(Σ‖y − ŷ‖² / Σ‖y‖²) over the tokens at one position of the block.",
    "classes": "Tokens by their text: shares of all tokens and of the whole squared error.",
    "repeats": "Whether the token's id stood earlier in the block.",
    "worst": "Tokens with at least ten occurrences and the largest relative error.",
    "heaviest": "Tokens that hold most of the squared error.",
    "massive": "Tokens with massive outputs: their number, and their share of the whole squared error.",
    "dead": "Units that were active on none of the measured tokens.",
    "l0": "Mean number of active units per token.",
    "ratio": "Geometric mean over layers of the Lorsa's FVU divided by the other's; below 1 the Lorsa explains more.",
    "rank": "Spearman correlation over layers: are the same layers hard for both? Intervals resample layers.",
    "fit": "FVU = a N^−b + c, least squares; rms: distance of the points from the curve.",
}


def sentences(report: Numbers, rows: Mapping[str, Numbers]) -> list[str]:
    """What the report found, in words."""
    said = []
    for name, found in report["across"].items():
        if found is not None:
            said.append(_across(name, found))
    layers = [layer for layer in report["layers"] if layer["partner"] is not None]
    if layers:
        said.append(_overlap(layers))
    inside = [
        (layer["heads"][layer["main"]]["inside"], layer["heads"][layer["main"]]["inside_other"])
        for layer in report["layers"]
    ]
    if inside and all(value is not None for pair in inside for value in pair):
        own, other = (sum(values) / len(values) for values in zip(*inside, strict=True))
        said.append(
            f"{own:.0%} of the Lorsa's squared error lies in the span of what the original heads wrote at the token "
            f"({other:.0%} in that of another token); the rest is invented."
        )
    for entry in report["fits"]:
        if entry["fit"] is not None and entry["over"] == "parameters":
            fit = entry["fit"]
            known = f"rms {fit['rms']:.4f}" if fit["degrees"] > 0 else "through as many points as it has parameters"
            series = f"{LABELS[entry['kind']]} of layer {entry['layer']}, K {entry['k']}"
            law = f"FVU = {fit['a']:.3g} N^−{fit['b']:.2f} + {fit['c']:.3f}"
            said.append(f"{series}: {law} from {fit['low']:,.0f} to {fit['high']:,.0f} parameters ({known}).")
    return said or [f"{len(rows)} runs, none of them a Lorsa with another dictionary beside it."]


def _across(name: str, found: Numbers) -> str:
    layers = "1 layer" if found["layers"] == 1 else f"{found['layers']} layers"
    ratio = f"{found['ratio']:.2f}{_interval(found['ratio_interval'])}"
    words = f"Lorsa against {LABELS[name]}, {layers} at equal budgets: FVU ratio {ratio}"
    words += f", lower at {found['lower']} of {found['layers']}"
    if found["rank_correlation"] is None:
        return words + "."
    return words + f"; rank correlation {found['rank_correlation']:.2f}{_interval(found['rank_correlation_interval'])}."


def _overlap(layers: Sequence[Numbers]) -> str:
    own = [next(entry for entry in layer["overlap"] if entry["run"] == layer["partner"]) for layer in layers]
    cosine, shuffled = (_range([entry[name] for entry in own]) for name in ("cosine", "shuffled_cosine"))
    words = f"Errors of Lorsa and SAE have a cosine of {cosine} (shuffled tokens: {shuffled})"
    linear = [layer["r2_from_partner"] for layer in layers if layer["r2_from_partner"] is not None]
    return words + (f"; the SAE's error predicts {_range(linear)} of the Lorsa's, linearly." if linear else ".")


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}".replace("-", "−"), f"{max(values):.2f}".replace("-", "−")
    return low if low == high else f"{low} to {high}"


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f" (95 % {ends[0]:.2f} to {ends[1]:.2f})".replace("-", "−")
