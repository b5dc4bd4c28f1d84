"""A made-up atlas of the spectral lens: sparse, cancelling, structureless, sink and silent heads, and hostile tokens.

Nothing in it was measured. The statistics of a firing are those of its made-up contributions, so that a page can be
checked against them.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.atlas.write import AtlasWriter
from tests.view.synthetic_atlas import make_text

KINDS = ("sparse", "cancelling", "structureless", "sink", "silent")
VERDICTS = {
    "sparse": "sparse, separated",
    "cancelling": "sparse but cancelling",
    "structureless": "not separated",
    "sink": "sink",
    "silent": "no firings",
}
CONTROLS = ("gauge", "span", "subspace", "shuffle", "untrained")
MODES_SHOWN = 6
MODES_LISTED = 4


def write_synthetic_spectral_atlas(
    path: Path,
    *,
    layers: int = 4,
    heads: int = 6,
    width: int = 16,
    prompts: int = 5,
    length: int = 60,
    firings: int = 20,
    controls: Collection[str] = CONTROLS,
    basis: str = "fixed",
    rotated: bool = True,
    shared: bool = True,
    seed: int = 0,
) -> Path:
    """Write every table and `atlas.json`; heads take the kinds of `KINDS` in turn, head 0.0 first.

    `controls` says which were run. In the basis `offset`, modes differ from pair to pair where layers are `rotated`.
    """
    rng = np.random.default_rng(seed)
    texts = [text[:length] for text in make_text(prompts, rng)]
    texts[0][4 : 4 + 12] = make_hostile()[: len(texts[0][4 : 4 + 12])]
    vocabulary = sorted({token for text in texts for token in text})
    identifier = {token: number for number, token in enumerate(vocabulary)}
    rows: dict[str, list[dict[str, Any]]] = {"spectra": [], "controls": [], "firings": [], "modes": []}
    for layer in range(layers):
        for head in range(heads):
            kind = KINDS[(layer * heads + head) % len(KINDS)]
            _describe(kind, layer, head, width, firings, texts, vocabulary, controls, rows, rng)
    if basis == "offset" and rotated:
        rows["modes"] = [
            row | {"sigma": 0.9 * row["sigma"], "query_tokens": [], "key_tokens": []} for row in rows["modes"]
        ]
    with AtlasWriter(path, about=_provenance(prompts, layers, basis)) as atlas:
        atlas.append(
            "prompts",
            {
                "prompt": list(range(prompts)),
                "name": [f"ABBA </script> {number}" for number in range(prompts)],
                "tokens": texts,
                "token_ids": [[identifier[token] for token in text] for text in texts],
            },
        )
        for name, of_table in rows.items():
            if of_table:
                atlas.append(name, {column: [row[column] for row in of_table] for column in of_table[0]})
        if shared:
            _share(atlas, layers, heads, width, rng)
    return path


def make_hostile() -> list[str]:
    """Tokens that would break a page that took them for anything but text."""
    return [
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(2)>",
        "\u202egnp.exe",
        "zero\u200bwidth",
        "\n",
    ]


def _describe(
    kind: str,
    layer: int,
    head: int,
    width: int,
    firings: int,
    texts: list[list[str]],
    vocabulary: list[str],
    controls: Collection[str],
    rows: dict[str, list[dict[str, Any]]],
    rng: np.random.Generator,
) -> None:
    own = [] if kind == "silent" else [_firing(kind, layer, head, width, texts, rng) for _ in range(firings)]
    measured = [row for row in own if not row["sink"]]
    rows["firings"] += [{name: value for name, value in row.items() if name != "all"} for row in own]
    sigma = np.sort(rng.gamma(2, 1.2, width))[::-1]
    median = {
        name: float(np.median([row[name] for row in measured])) if measured else None
        for name in ("n_recon", "cancellation", "largest_rank")
    }
    sparsity = float(np.mean([row["sparsity"] for row in measured])) if measured else None
    behaviour = rng.dirichlet(np.ones(5) * 0.4)
    rows["spectra"].append(
        {
            "layer": layer,
            "head": head,
            "verdict": VERDICTS[kind] if {"gauge", "span"} <= set(controls) or not measured else "not compared",
            "n_firings": len(measured) * 3,
            "n_sink": len(own) - len(measured),
            "sparsity": sparsity,
            **median,
            "energy_query": float(rng.lognormal(0, 0.5)),
            "energy_key": float(rng.lognormal(0, 0.5)),
            **dict(zip(("previous", "duplicate", "induction", "sink"), behaviour[:4].tolist(), strict=True)),
            "rank": width,
            "degenerate": int(rng.integers(3)),
            "error": 1e-15,
            "sigma": sigma.tolist(),
        }
    )
    if sparsity is not None:
        rows["controls"] += [_control(kind, layer, head, name, sparsity, rng) for name in CONTROLS if name in controls]
    rows["modes"] += _modes(layer, head, sigma, own, vocabulary, rng)


def _firing(kind: str, layer: int, head: int, width: int, texts: list[list[str]], rng: np.random.Generator) -> dict:
    prompt = int(rng.integers(len(texts)))
    query = int(rng.integers(2, len(texts[prompt])))
    on_sink = kind == "sink" or rng.random() < 0.15
    key = 0 if on_sink else int(rng.integers(1, query + 1))
    c = _contributions(kind, (layer + head) % 3, width, rng)
    order = np.argsort(-np.abs(c))[:MODES_SHOWN]
    total, size = float(c.sum()), float(np.abs(c).sum())
    reached = np.cumsum(np.sort(c * np.sign(total))[::-1]) >= abs(total) * (1 - 5e-6)
    return {
        "layer": layer,
        "head": head,
        "prompt": prompt,
        "query": query,
        "key": key,
        "sink": on_sink,
        "attention": float(rng.uniform(0.5, 1)),
        "score": total + float(rng.normal()),
        "relative": total,
        "sparsity": float(np.abs(c).mean() ** 2 / (c**2).mean()),
        "n_recon": int(reached.argmax()) + 1,
        "cancellation": size / abs(total),
        "largest_rank": float(order[0] / (width - 1)),
        "modes": order.tolist(),
        "contributions": c[order].tolist(),
        "query_side": rng.normal(1, 1, MODES_SHOWN).tolist(),
        "rest": total - float(c[order].sum()),
        "all": c,
    }


def _contributions(kind: str, first: int, width: int, rng: np.random.Generator) -> np.ndarray:
    c = rng.normal(size=width) * rng.normal(size=width)
    if kind in ("sparse", "cancelling"):
        c *= 0.08
        c[first] = rng.uniform(4, 9)
        c[first + 3] = rng.uniform(0.5, 3)
    if kind == "cancelling":
        c[first + 5] = -rng.uniform(2, 5)
    return c if abs(c.sum()) > 0.3 else c + 0.3


def _control(kind: str, layer: int, head: int, name: str, sparsity: float, rng: np.random.Generator) -> dict:
    apart = kind in ("sparse", "cancelling")
    effect = 0.4 - sparsity + float(rng.normal(0, 0.02)) if apart else float(rng.normal(0, 0.01))
    wide = 0.02 if apart else 0.05
    few = name in ("subspace", "untrained")
    return {
        "layer": layer,
        "head": head,
        "control": name,
        "draws": 3 if few else 1000,
        "sparsity": sparsity + effect,
        "n_recon": float(rng.integers(1, 9)),
        "effect": effect,
        "low": effect - wide,
        "high": effect + wide,
        "p": None if few else (0.001 if apart else 0.4),
        "q": None if few else (0.002 if apart else 0.5),
    }


def _modes(layer: int, head: int, sigma: np.ndarray, own: list[dict], vocabulary: list[str], rng) -> list[dict]:
    if not own:
        return []
    size = np.sum([np.abs(row["all"]) for row in own], axis=0)
    share = size / size.sum()
    return [
        {
            "unit_id": f"mode.{layer}.{head}.{mode}",
            "layer": layer,
            "head": head,
            "mode": int(mode),
            "sigma": float(sigma[mode]),
            "degenerate": bool(mode == 1),
            "share": float(share[mode]),
            "query_tokens": _near(vocabulary, rng),
            # no token is near the last one's key direction
            "key_tokens": _near(vocabulary, rng) if place + 1 < MODES_LISTED else [],
        }
        for place, mode in enumerate(np.argsort(-share)[:MODES_LISTED])
    ]


def _near(vocabulary: list[str], rng: np.random.Generator) -> list[dict[str, Any]]:
    picks = rng.choice(len(vocabulary), 6, replace=False)
    cosines = np.sort(rng.uniform(0.1, 0.6, 6))[::-1]
    return [
        {"token": vocabulary[i], "token_id": int(i), "logit": float(v)} for i, v in zip(picks, cosines, strict=True)
    ]


def _share(atlas: AtlasWriter, layers: int, heads: int, width: int, rng: np.random.Generator) -> None:
    rows = [
        {
            "layer": layer,
            "side": side,
            "head_a": a,
            "head_b": b,
            "overlap": 1.0 if side == "key" and a // 3 == b // 3 else float(rng.uniform(0.1, 0.6)),
            "random": width / 128,
        }
        for layer in range(layers)
        for side in ("query", "key")
        for a in range(heads)
        for b in range(a + 1, heads)
    ]
    atlas.append("shared_modes", {name: [row[name] for row in rows] for name in rows[0]})
    for layer in range(layers):
        atlas.append_metrics(layer, "mode", {"shared_modes": 7 + layer, "shared_modes_rotated": 0.4})


def _provenance(prompts: int, layers: int, basis: str) -> dict[str, Any]:
    return {
        "model": "synthetic-spectral",
        "model_note": "Synthetic numbers for tests: no model was run, nothing here was measured. </script><b>note</b>",
        "task": "ioi",
        "text": f"{prompts} prompts (generated)",
        "tokens": prompts * 60,
        "threshold": 0.5,
        "basis": basis,
        "layers": layers,
        "seed": 0,
    }
