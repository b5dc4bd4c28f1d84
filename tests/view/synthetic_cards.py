"""Made-up cards for the units of the synthetic atlas: every table that a card draws on, hostile tokens among them."""

from pathlib import Path
from typing import Any

import numpy as np

from clearhead.atlas import Atlas, add_tables
from tests.view.synthetic_atlas import HOSTILE

BEHAVIOURS = ("induction", "previous_token", "bos_sink", "name_mover")
THRESHOLD = 0.5
TRUST = ("seed_stability", "causal_effect", "predicted_effect", "explained", "host_share", "a_new_measure")
CHANGED = ("own", "random", "other")
BECOMES = ("2", "mean", "0", "10")
LONG_CASE = [f" w{i}" for i in range(200)]


def add_cards(path: Path, seed: int = 0) -> None:
    """Give every live Lorsa head a card; head 1 has none, as if it had been added later."""
    rng = np.random.default_rng(seed)
    units = Atlas(path).sql("select unit_id from units where dead is not true order by index, kind")
    names = [row["unit_id"] for row in units if row["unit_id"] != "lorsa.12.1"]
    lorsa = [name for name in names if name.startswith("lorsa")]
    tables: dict[str, list[dict[str, Any]]] = {"behaviours": [], "relations": [], "trust": [], "explanations": []}
    for place, name in enumerate(names):
        tables["behaviours"] += [_behaviour(name, behaviour, place, rng) for behaviour in BEHAVIOURS]
    for place, name in enumerate(lorsa):
        tables["relations"] += _relations(name, place, lorsa, rng)
        tables["trust"] += [_trust(name, measure, rng) for measure in TRUST]
        tables["explanations"] += _explanations(name, place, rng)
    tables["trust"].append(_trust("family.12.0", "causal_effect", rng))
    tables["interventions"] = [
        _intervention(name, becomes, changed)
        for name in ("lorsa.12.0", "lorsa.12.4")
        for becomes in BECOMES
        for changed in CHANGED
    ]
    parts = {table: [{column: [row[column] for row in rows] for column in rows[0]}] for table, rows in tables.items()}
    add_tables(path, {**parts, "families": [_families(lorsa)]})


def _behaviour(name: str, behaviour: str, place: int, rng: np.random.Generator) -> dict[str, Any]:
    score = float(rng.uniform(0.5, 1) if rng.random() < 0.2 else rng.uniform(0, 0.5))
    tokens = [" Ada", " met", " Ben", ".", " Ada"]
    if place == 0:
        tokens = [*HOSTILE[:4], *tokens]
    if place == 1:  # the key far before the query
        tokens = [" Ada", *LONG_CASE, *tokens]
    return {
        "unit_id": name,
        "behaviour": behaviour,
        "score": score,
        "threshold": THRESHOLD,
        "found": score >= THRESHOLD,
        "cases": int(rng.integers(5, 400)),
        "tokens": tokens,
        "query": len(tokens) - 1,
        "keys": [0] if place == 1 else [len(tokens) - 4],
    }


def _intervention(name: str, becomes: str, changed: str) -> dict[str, Any]:
    size = {"own": 1.0, "random": 0.25, "other": -0.5}[changed]
    numbers = {"effect": size, "low": size - 0.1, "high": size + 0.1, "slope": None if changed == "random" else 1.0}
    predicted = {"direct": 9.0, "linear": 9.0, "gradient": 1.5, "loss": 0.0, "kl": 0.01}
    return {"unit_id": name, "becomes": becomes, "changed": changed, **numbers, **predicted, "cases": 8}


def _relations(name: str, place: int, lorsa: list[str], rng: np.random.Generator) -> list[dict[str, Any]]:
    others = {
        "reads": [(f"embedding.{i}", HOSTILE[i]) for i in range(12)],
        "writes": [(f"feature.13.{i}", "") for i in range(3)],
        "query": [("embedding.5", " said"), (lorsa[(place + 1) % len(lorsa)], "")],
        "key": [("embedding.9", "x" * 120)],
        "modes": [("mode.12.3.0", "")],
    }
    return [
        {
            "unit_id": name,
            "relation": relation,
            "rank": rank,
            "other": other,
            "label": label,
            "value": value,
            "share": 0.25 if relation == "key" else None,
        }
        for relation, entries in others.items()
        for rank, ((other, label), value) in enumerate(zip(entries, -np.sort(-rng.normal(0, 1, 12)), strict=False))
    ]


def _trust(name: str, measure: str, rng: np.random.Generator) -> dict[str, Any]:
    value = float(rng.uniform(-0.1, 1))
    bare = measure == "explained"
    ends = {"low": None, "high": None} if bare else {"low": value - 0.1, "high": value + 0.1}
    return {"unit_id": name, "measure": measure, "value": value, "cases": int(rng.integers(1, 300)), **ends}


def _explanations(name: str, place: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    said = {"unit_id": name, "explainer": "template", "explanation": "fires on ' said' and reads the name before it"}
    scores = [
        {
            "scorer": scorer,
            "judge": "template",
            "score": float(score),
            "low": score - 0.1,
            "high": score + 0.1,
            "cases": 40,
        }
        for scorer, score in zip(("detection", "fuzzing", "intruder"), rng.uniform(0.4, 0.9, 3), strict=True)
    ]
    unscored = dict.fromkeys(("scorer", "judge", "score", "low", "high", "cases"))
    model = {**said, "explainer": "some/model", "explanation": f"quotes <b>and</b> {HOSTILE[0]}"} | unscored
    return [said | one for one in scores] + ([model] if place % 3 == 0 else [])


def _families(lorsa: list[str]) -> dict[str, list[Any]]:
    members = [lorsa[0:7], lorsa[10:13], lorsa[20:22]]
    return {
        "family": ["family.12.0", "family.12.1", "family.12.2"],
        "layer": [12] * 3,
        "units": members,
        "overlap": [0.93, 0.88, 0.9],
        "read_rank": [5.2, 2.1, 1.4],
        "write_rank": [5.9, 2.4, 1.8],
        "label": ["1 token back", f"after {HOSTILE[0]}", ""],
    }
