"""A fidelity report as `clearhead fidelity` writes it, of planted numbers: six layers, three sizes at one of them."""

LAYERS = range(6)
HEADS = 4
HOSTILE = "</script><b>\u202e"


def row(run, kind, layer, fvu, parameters=10_000, k=16, init=None, **more):
    return {
        "run": run,
        "path": f"runs/{run}",
        "kind": kind,
        "units": parameters // 50,
        "parameters": parameters,
        "k": k,
        "init": init,
        "seed": 0,
        "trained_tokens": 50_000,
        "layer": layer,
        "tokens": 2000,
        "fvu": fvu,
        "explained_variance": 1 - fvu,
        "relative_error_position_0": 0.2,
        "l0": float(k),
        "dead_heads": 3,
        "dead_share": 0.03,
        "over_dense_heads": 0,
        "over_dense_share": 0.0,
        "relative_error_by_position": [0.2, 0.5, 0.4, 0.3],
        **more,
    }


def overlap(run, cosine):
    return {
        "run": run,
        "tokens": 2000,
        "correlation": 0.6,
        "correlation_interval": [0.5, 0.7],
        "rank_correlation": 0.7,
        "relative_rank_correlation": 0.4,
        "cosine": cosine,
        "cosine_interval": [cosine - 0.01, cosine + 0.01],
        "pooled_cosine": cosine,
        "shuffled_cosine": -0.01,
        "shuffled_correlation": 0.0,
    }


def by_token():
    line = {"tokens": 1000, "share_of_tokens": 0.5, "share_of_error": 0.6, "relative_error": 0.4}
    names = {"positions": ["1", "2–3"], "repeats": ["first occurrence", "repeat"], "classes": ["number", "word start"]}
    tables = {table: [{"name": name, **line} for name in found] for table, found in names.items()}
    return tables | {
        "worst": [{"name": HOSTILE, **line}, {"name": " the", **line}],
        "heaviest": [{"name": "  ", **line}],
    }


def layer(number):
    names = {"sae": f"{number}-sae", "transcoder": None, "reference": f"{number}-reference", "seed": None}
    head = {"error_share": [0.1, 0.2, 0.3, 0.4], "unexplained": [0.1] * HEADS, "inside": 0.8, "inside_other": 0.1}
    main, sae = f"{number}-lorsa", f"{number}-sae"
    return {
        "layer": number,
        "main": main,
        "partner": sae,
        "tokens": 1990,
        "massive_tokens": 10,
        "massive_share_of_error": {main: 0.25, sae: 0.5},
        "overlap": [overlap(sae, 0.3), overlap(f"{number}-reference", 0.7)],
        "r2_from_input": 0.1,
        "r2_from_partner": 0.35,
        "heads": {"output_share": [0.4, 0.3, 0.2, 0.1], main: head, sae: head},
        "by_token": {main: by_token(), sae: by_token()},
        "compared": {name: run and {"run": run, "equal": name != "reference"} for name, run in names.items()},
    }


def synthetic_report(layers=LAYERS):
    runs = []
    for number in layers:
        runs += [
            row(
                f"{number}-lorsa",
                "lorsa",
                number,
                0.2 + 0.02 * number,
                init="data",
                fvu_ordinary=0.3,
                massive_tokens=10,
            ),
            row(f"{number}-sae", "sae", number, 0.15 + 0.02 * number),
            row(f"{number}-reference", "lorsa", number, 0.25 + 0.02 * number, init="reference"),
        ]
    fit = {
        "a": 2.0,
        "b": 0.3,
        "c": 0.1,
        "low": 1e4,
        "high": 4e4,
        "points": 3,
        "rms": 0.0,
        "left_out": None,
        "degrees": 0,
    }
    series = {"kind": "lorsa", "layer": 0, "init": "data", "trained_tokens": 50_000}
    points = [[1e4, 0.3], [2e4, 0.25], [4e4, 0.22]]
    across = {"layers": len(layers), "lower": 0, "ratio": 1.2, "ratio_interval": [1.1, 1.3]}
    return {
        "model": "planted",
        "model_note": "",
        "text": "default",
        "text_sha256": "0" * 64,
        "split": "held_out",
        "context": 4,
        "tokens": 2000,
        "runs": runs,
        "layers": [layer(number) for number in layers],
        "across": {
            "sae": across | {"rank_correlation": 0.9, "rank_correlation_interval": [0.5, 1.0]},
            "transcoder": None,
            "reference": None,
            "seed": None,
        },
        "fits": [
            {**series, "k": 16, "over": "parameters", "points": points, "fit": fit, "refused": None},
            {**series, "kind": "sae", "init": None, "k": 16, "over": "parameters", "points": points, "fit": None}
            | {"refused": "the values do not fall with size"},
            {**series, "parameters": 10_000, "over": "k", "points": [[8, 0.4], [16, 0.3]], "fit": None}
            | {"refused": "2 different sizes carry no fit"},
        ],
        "left_out": [["runs/mlp", "it predicts mlp_out, not attn_out, from mlp_in"]],
    }
