"""Planted atlases: units of which it is known when they are active, on random words of a small vocabulary."""

import numpy as np
import pytest

from clearhead.atlas import Atlas, AtlasWriter

WORDS = [*(f" w{i}" for i in range(120)), " the", " of", " cat", " 7", " 7", " 7", "."]
CONTEXT = 120
FIRST = 1


def write_planted(path, units, *, kind="lorsa", layer=3, n_texts=40, examples=16, negatives=16, seed=0, words=None):
    """An atlas of planted units.

    units: functions (tokens, place) -> source place or None where the unit is inactive, one per unit.
    words: the vocabulary that the texts are drawn from, `WORDS` if not given.
    """
    rng = np.random.default_rng(seed)
    vocabulary = WORDS if words is None else words
    texts = [[vocabulary[i] for i in rng.integers(len(vocabulary), size=CONTEXT)] for _ in range(n_texts)]
    rows = {"units": [], "examples": [], "patterns": []}
    for index, source_of in enumerate(units):
        unit_id = f"{'feature' if kind == 'sae' else kind}.{layer}.{index}"
        rows["units"].append({"unit_id": unit_id, "kind": kind, "layer": layer, "index": index})
        sources = [[source_of(text, place) if place >= FIRST else None for place in range(CONTEXT)] for text in texts]
        on = [(b, t) for b in range(n_texts) for t in range(CONTEXT) if sources[b][t] is not None]
        off = [(b, t) for b in range(n_texts) for t in range(FIRST, CONTEXT) if sources[b][t] is None]
        taken = [(place, "top") for place in rng.permutation(len(on))[:examples]]
        taken += [(place, "negative") for place in rng.permutation(len(off))[:negatives]]
        for rank, (place, category) in enumerate(taken):
            block, position = (off if category == "negative" else on)[place]
            start, stop = max(position - 80, 0), min(position + 16, CONTEXT)
            activations = [0.0 if sources[block][t] is None else 2.0 for t in range(start, stop)]
            number = len(rows["examples"])
            rows["examples"].append(
                {
                    "example_id": number,
                    "unit_id": unit_id,
                    "category": category,
                    "rank": rank,
                    "activation": 0.0 if category == "negative" else 2.0,
                    "document": f"text {block}",
                    "block": block,
                    "position": position,
                    "start": start,
                    "tokens": texts[block][start:stop],
                    "token_ids": [vocabulary.index(token) for token in texts[block][start:stop]],
                    "activations": activations,
                }
            )
            if category != "negative" and kind == "lorsa":
                pattern = {"keys": [sources[block][position]], "weights": [2.0], "rest": 0.5, "row_sum": 2.5}
                rows["patterns"].append({"example_id": number, "unit_id": unit_id, "query": position - start} | pattern)
    with AtlasWriter(path, {"model": "planted"}) as atlas:
        for table, entries in rows.items():
            if entries:
                atlas.append(table, {name: [entry[name] for entry in entries] for name in entries[0]})
    return Atlas(path)


def on_token(tokens, place):
    """Active on `the` and `of`; reads the token itself."""
    return place if tokens[place] in (" the", " of") else None


def after_cat(tokens, place):
    """Active after `cat`; reads it."""
    return place - 1 if tokens[place - 1] == " cat" else None


def at_begin(tokens, place):
    """Active on places 1 to 3; reads the first token."""
    return 0 if 1 <= place <= 3 else None


def same_earlier(tokens, place):
    """Active on a `7` that has occurred before; reads the copy."""
    copies = [earlier for earlier in range(max(place - 20, 0), place) if tokens[earlier] == " 7"]
    return copies[-1] if tokens[place] == " 7" and copies else None


def at_random(tokens, place):
    """Active on no regularity."""
    return place if hash_of(tokens, place) % 60 == 0 else None


def hash_of(tokens, place):
    return int("".join(str(len(token)) for token in tokens[:8])) * 7919 + place * 104729 >> 3


PLANTED = (on_token, after_cat, at_begin, same_earlier, at_random)


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    return write_planted(tmp_path_factory.mktemp("explain") / "atlas", PLANTED)


@pytest.fixture(scope="session", name="write_planted")
def planted_factory():
    return write_planted
