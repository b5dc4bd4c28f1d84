"""A made-up atlas with the real tables: sparse heads that read one word class and write another, and hostile tokens.

Nothing in it was measured; it exists so that the page can be built and looked at without a model.
"""

from pathlib import Path
from typing import Any

import numpy as np

from clearhead.atlas.write import AtlasWriter

CONTEXT = 256
WINDOW = 64
ORIGINAL_HEADS = 9
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\u202egnp.exe",
    "zero\u200bwidth",
    "\n",
    "\t",
    "\r\n",
    "\x00\x1b[31m",
    "<!--",
    "]]>",
    "&lt;b&gt;",
    "'\"`",
    "\ufeff",
    "\u2028",
    " {{ 7*7 }}",
    "x" * 300,
    "\u0301",
    " \u05e9\u05dc\u05d5\u05dd",
    "\U0001f469\u200d\U0001f52c",
)

_NAMES = [" Ada", " Ben", " Clara", " Dinesh", " Edith", " Farid", " Greta", " Hugo", " Ines", " Jonas"]
_PLACES = [" the harbour", " the mill", " the old library", " the orchard", " the station", " the market"]
_VERBS = [" carried", " mended", " sold", " painted", " found", " hid", " borrowed", " returned"]
_THINGS = [" a lantern", " the letter", " a brass key", " three apples", " the map", " a blue coat", " an accordion"]
_SENTENCES = (
    "{n}{v}{t} at{p}, and{m} watched from{q}.",
    " When{n} came to{p},{m} had already{v}{t};{n} said nothing.",
    " \u201cYou{v}{t},\u201d said{m} to{n}, \u201cand now{p} is empty.\u201d",
    " Nobody at{p} knew that{n}{v}{t} before{m} did.",
    " In the morning{m} went back to{p} with{n} to look for{t}.",
)


def _pieces(sentence: str, rng: np.random.Generator) -> list[str]:
    """Split into word pieces the way a byte-pair vocabulary would: leading spaces kept, long words cut in two."""
    pieces: list[str] = []
    word = ""
    for character in sentence:
        if character in " .,;\u201c\u201d" and word not in ("", " "):
            pieces.append(word)
            word = ""
        word += character
    pieces.append(word)
    cut = [(p[:5], p[5:]) if len(p) > 8 and rng.random() < 0.7 else (p,) for p in pieces if p]
    return [part for parts in cut for part in parts if part]


def make_text(blocks: int, rng: np.random.Generator) -> list[list[str]]:
    text = []
    for number in range(blocks):
        tokens = ["<|endoftext|>"]
        while len(tokens) < CONTEXT:
            choose = {name: str(rng.choice(pool)) for name, pool in zip("nmvtpq", _pools(), strict=True)}
            tokens += _pieces(str(rng.choice(_SENTENCES)).format(**choose), rng)
            if rng.random() < 0.12:
                tokens.append("\n")
            if rng.random() < 0.03:
                tokens.append(HOSTILE[int(rng.integers(len(HOSTILE)))])
        if number == 0:
            tokens[40 : 40 + len(HOSTILE)] = HOSTILE
        text.append(tokens[:CONTEXT])
    return text


def _pools() -> tuple[list[str], ...]:
    return _NAMES, _NAMES, _VERBS, _THINGS, _PLACES, _PLACES


def write_synthetic_atlas(path: Path, *, heads: int = 600, groups: int = 12, blocks: int = 48, seed: int = 0) -> Path:
    """Write every table and `atlas.json` under `path`; head 0's best example shows all `HOSTILE` tokens."""
    rng = np.random.default_rng(seed)
    text = make_text(blocks, rng)
    vocabulary = sorted({token for block in text for token in block})
    identifier = {token: number for number, token in enumerate(vocabulary)}
    units, examples, patterns = [], [], []
    for index in range(heads):
        dead = index % 37 == 20
        unit = _unit(index, groups, heads, dead, vocabulary, rng)
        units.append(unit)
        if not dead:
            _describe(unit, text, identifier, examples, patterns, rng)
    with AtlasWriter(path, about=_provenance(blocks)) as atlas:
        for name, rows in (
            ("units", units),
            ("examples", examples),
            ("patterns", patterns),
            ("layers", _layers()),
        ):
            atlas.append(name, {column: [row[column] for row in rows] for column in rows[0]})
        original = [f"head.12.{head}" for head in range(ORIGINAL_HEADS)]
        places = {"layer": [12] * ORIGINAL_HEADS, "index": list(range(ORIGINAL_HEADS))}
        atlas.append("units", {"unit_id": original, "kind": ["head"] * ORIGINAL_HEADS, **places})
    return path


def _unit(index: int, groups: int, heads: int, dead: bool, vocabulary: list[str], rng: np.random.Generator) -> dict:
    host = index * ORIGINAL_HEADS // heads
    sharpness = rng.uniform(0.5, 12)
    peak = 0.0 if dead else float(rng.lognormal(0.7, 0.6))
    n_tokens = 102_400
    n_active = 0 if dead else int(n_tokens * 10 ** rng.uniform(-4.3, -0.9))
    counts = np.zeros(40, dtype=int) if dead else rng.poisson(n_active * _falling(40))
    picks = rng.choice(len(vocabulary), 20, replace=False)
    logits = np.sort(rng.gamma(3, 0.12, 20))[::-1]

    def share() -> list[float]:
        weights = rng.dirichlet(np.ones(ORIGINAL_HEADS) * 0.4) + sharpness * 0.3 * (np.arange(ORIGINAL_HEADS) == host)
        return (weights / weights.sum()).tolist()

    shares = [None if dead else share() for _ in range(3)]
    participation = [None if dead else 1 / sum(p * p for p in s) for s in shares]
    return {
        "unit_id": f"lorsa.12.{index}",
        "kind": "lorsa",
        "layer": 12,
        "index": index,
        "group": index * groups // heads,
        "n_tokens": n_tokens,
        "n_active": n_active,
        "rate": n_active / n_tokens,
        "mean_activation": None if dead else peak * 0.31,
        "max_activation": None if dead else peak,
        "dead": dead,
        "histogram": counts.tolist(),
        "histogram_edges": np.linspace(0, peak or 1, 41).tolist(),
        "decoder_norm": float(rng.uniform(0.6, 1.4)),
        "raised": [_logit(vocabulary, int(i), float(v)) for i, v in zip(picks[:10], logits, strict=False)],
        "lowered": [_logit(vocabulary, int(i), -float(v)) for i, v in zip(picks[10:], logits, strict=False)],
        "share_output": shares[0],
        "share_weights": shares[1],
        "share_routing": shares[2],
        "participation_output": participation[0],
        "participation_weights": participation[1],
        "participation_routing": participation[2],
    }


def _falling(bins: int) -> np.ndarray:
    weights = np.exp(-np.arange(bins) / 8)
    return weights / weights.sum()


def _logit(vocabulary: list[str], token_id: int, value: float) -> dict[str, Any]:
    return {"token": vocabulary[token_id], "token_id": token_id, "logit": value}


def _describe(unit: dict, text: list, identifier: dict, examples: list, patterns: list, rng: np.random.Generator):
    fires = str(rng.choice(list(identifier)))
    places = [(b, t) for b, block in enumerate(text) for t, token in enumerate(block) if token == fires and t > 20]
    while len(places) < 32:
        places.append((int(rng.integers(len(text))), int(rng.integers(20, CONTEXT))))
    plan = [("top", rank, unit["max_activation"] * 0.97**rank) for rank in range(16)]
    plan += [("quantile", rank, unit["max_activation"] * (8 - rank) / 10) for rank in range(8)]
    plan += [("negative", rank, 0.0) for rank in range(8)]
    for (category, rank, activation), (block, position) in zip(plan, places, strict=False):
        if unit["index"] == 0 and category == "top" and rank == 0:
            block, position = 0, 70
        start = max(0, min(position - WINDOW + 12, CONTEXT - WINDOW))
        tokens = text[block][start : start + WINDOW]
        query = position - start
        activations = np.zeros(len(tokens))
        activations[query] = activation
        if activation:
            others = rng.choice(len(tokens), 3)
            activations[others] = np.maximum(activations[others], rng.uniform(0, activation, 3) * 0.7)
        example_id = len(examples)
        examples.append(
            {
                "example_id": example_id,
                "unit_id": unit["unit_id"],
                "category": category,
                "rank": rank,
                "activation": activation,
                "document": f"Tales of the harbour, volume {block % 7 + 1}",
                "block": block,
                "position": position,
                "start": start,
                "tokens": tokens,
                "token_ids": [identifier[token] for token in tokens],
                "activations": activations.tolist(),
            }
        )
        patterns.append(_pattern(unit, example_id, query, position, activation, rng))


def _pattern(unit: dict, example_id: int, query: int, position: int, activation: float, rng: np.random.Generator):
    count = int(rng.integers(3, 9))
    keys = np.unique(np.append(position - rng.geometric(0.06, count).clip(0, position), [0, position]))
    weights = rng.normal(0, 0.08, len(keys)) * unit["max_activation"]
    rest = float(rng.normal(0, 0.01))
    weights[rng.integers(len(keys))] += activation - weights.sum() - rest
    return {
        "example_id": example_id,
        "unit_id": unit["unit_id"],
        "query": query,
        "keys": keys.tolist(),
        "weights": weights.tolist(),
        "rest": rest,
        "row_sum": float(weights.sum()) + rest,
    }


def _layers() -> list[dict[str, Any]]:
    metrics = {
        "fvu": 0.208,
        "explained_variance": 0.792,
        "l0": 61.7,
        "dead_share": 0.027,
        "over_dense_share": 0.004,
        "dead_heads": 16.0,
        "tokens": 102_000.0,
        "ce_clean": 2.713,
        "ce_replaced": 2.741,
        "ce_zero": 2.986,
        "ce_mean": 2.955,
        "ce_recovered": 0.897,
        "ce_recovered_over_mean": 0.884,
        "kl_replaced": 0.031,
        "relative_error_position_0": 0.021,
        "spanning_output": 0.243,
        "spanning_output_low": 0.211,
        "spanning_output_high": 0.277,
    }
    for position in range(CONTEXT):
        metrics[f"relative_error_by_position_{position}"] = 0.02 if position == 0 else 0.3 + 0.03 * np.log1p(position)
    return [{"layer": 12, "kind": "lorsa", "metric": name, "value": value} for name, value in metrics.items()]


def _provenance(blocks: int) -> dict[str, Any]:
    return {
        "model": "synthetic-135m",
        "model_note": "Synthetic numbers for tests: no model was run, nothing here was measured. </script><b>note</b>",
        "layer": 12,
        "text": "Tales of the harbour (generated)",
        "text_sha256": "3f8e1c5a9b7d2e4f60718293a4b5c6d7e8f90123456789abcdef0123456789ab",
        "tokens": blocks * CONTEXT,
        "seed": 0,
        "dictionary": {"name": "lorsa", "n_heads": 600, "k": 64},
    }
