"""What is known of a unit beyond its examples: behaviours, relations, its family, trust, interventions, explanations.

Read from the tables of those names, any of which may be empty: a part of a card that the atlas does not hold is left
out. Each unit's share goes into its packed part; what the list, its filters and the summary need goes into the index.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from clearhead.atlas.read import Atlas, Row
from clearhead.view.packing import Vocabulary, brief, group_by

PER_RELATION = 8
"""Entries shown of each relation; the atlas may hold more."""
IN_THE_LIST = {"stability": "seed_stability", "effect": "causal_effect"}
"""Columns of the list by the measure of table `trust` that they show."""
INTERVENTIONS = """
    select own.*, other.effect as other, random.effect as random
    from interventions own
    join interventions other on (own.unit_id, own.becomes) = (other.unit_id, other.becomes) and other.changed = 'other'
    join interventions random on (own.unit_id, own.becomes) = (random.unit_id, random.becomes)
        and random.changed = 'random'
    where own.changed = 'own'
    order by own.unit_id, try_cast(own.becomes as double) nulls last, own.becomes
"""
"""What setting a unit to each value did, with the two controls in one row."""
FAMILIES_SHOWN = 60
"""Families in the summary, those with the most members."""


class Cards:
    """The tables by unit. `behaviours` are the names of all that was tested, most often found first."""

    def __init__(self, atlas: Atlas):
        self._tested = group_by(atlas.sql("select * from behaviours order by unit_id, score desc"), "unit_id")
        relations = "select * from relations where rank < ? order by unit_id, relation, rank"
        self._relations = group_by(atlas.sql(relations, [PER_RELATION]), "unit_id")
        self._trust = group_by(atlas.sql("select * from trust order by unit_id, measure"), "unit_id")
        self._set = group_by(atlas.sql(INTERVENTIONS), "unit_id")
        explained = "select * from explanations order by unit_id, explainer, explanation, scorer, judge"
        self._explained = group_by(atlas.sql(explained), "unit_id")
        self.families = atlas.sql("select * from families order by len(units) desc, family")
        self._family = {unit: place for place, family in enumerate(self.families) for unit in family["units"]}
        found = Counter(row["behaviour"] for rows in self._tested.values() for row in rows if row["found"])
        names = {row["behaviour"] for rows in self._tested.values() for row in rows}
        self.behaviours = sorted(names, key=lambda name: (-found[name], name))
        self._place = {name: place for place, name in enumerate(self.behaviours)}

    def detail(self, unit_id: str, vocabulary: Vocabulary) -> dict[str, Any]:
        """The card of one unit."""
        return {
            "behaviours": [self._behaviour(row, vocabulary) for row in self._tested.get(unit_id, [])],
            "relations": {
                name: [_relation(row, vocabulary) for row in rows]
                for name, rows in group_by(self._relations.get(unit_id, []), "relation").items()
            },
            "trust": {row["measure"]: _interval(row) for row in self._trust.get(unit_id, [])},
            "interventions": [_setting(row) for row in self._set.get(unit_id, [])],
            "explanations": _explanations(self._explained.get(unit_id, []), vocabulary),
        }

    def _behaviour(self, row: Row, vocabulary: Vocabulary) -> dict[str, Any]:
        entry = {
            "name": self._place[row["behaviour"]],
            "score": brief(row["score"]),
            "threshold": brief(row["threshold"]),
            "cases": row["cases"],
            "found": row["found"],
        }
        if row["found"] and row["tokens"]:
            entry["tokens"] = [vocabulary.place(token) for token in row["tokens"]]
            entry["query"], entry["keys"] = row["query"], row["keys"]
        return entry

    def columns(self, units: list[Row]) -> dict[str, list[Any]]:
        """By unit: places of the behaviours found, place of its family, and the measures of the list."""
        ids = [unit["unit_id"] for unit in units]
        found = [[self._place[row["behaviour"]] for row in self._tested.get(name, []) if row["found"]] for name in ids]
        measured = [{row["measure"]: row["value"] for row in self._trust.get(name, [])} for name in ids]
        return {
            "behaves": found,
            "family": [self._family.get(name) for name in ids],
            **{column: [brief(own.get(measure)) for own in measured] for column, measure in IN_THE_LIST.items()},
        }

    def index(self, units: list[Row], vocabulary: Vocabulary) -> dict[str, Any]:
        """Names of behaviours with their counts by layer and kind, and the families."""
        kind = {unit["unit_id"]: (unit["layer"], unit["kind"]) for unit in units}
        counts: Counter[tuple[Any, ...]] = Counter()
        tested: Counter[tuple[Any, ...]] = Counter()
        for unit_id, rows in self._tested.items():
            for row in rows:
                place = (*kind.get(unit_id, (None, None)), self._place[row["behaviour"]])
                tested[place] += 1
                counts[place] += row["found"]
        return {
            "behaviours": self.behaviours,
            "found": [[*place, counts[place], tested[place]] for place in tested],
            "families": [self._family_entry(family, vocabulary) for family in self.families],
            "familiesShown": FAMILIES_SHOWN,
        }

    def _family_entry(self, family: Row, vocabulary: Vocabulary) -> dict[str, Any]:
        return {
            "name": family["family"],
            "layer": family["layer"],
            "units": family["units"],
            "label": vocabulary.place(family["label"]) if family["label"] else None,
            "trust": {row["measure"]: _interval(row) for row in self._trust.get(family["family"], [])},
            **{name: brief(family[name]) for name in ("overlap", "read_rank", "write_rank")},
        }


def _relation(row: Row, vocabulary: Vocabulary) -> list[Any]:
    label = vocabulary.place(row["label"]) if row["label"] else None
    return [row["other"], label, brief(row["value"]), brief(row["share"])]


def _setting(row: Row) -> list[Any]:
    numbers = ("effect", "low", "high", "gradient", "other", "random", "kl")
    return [row["becomes"], *(brief(row[name]) for name in numbers)]


def _interval(row: Row) -> list[Any]:
    return [brief(row["value"]), brief(row["low"]), brief(row["high"]), row["cases"]]


def _explanations(rows: list[Row], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """One entry per explainer and text, with the scores it was given."""
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["explainer"], row["explanation"])
        entry = entries.setdefault(
            key, {"by": vocabulary.place(key[0]), "text": vocabulary.place(key[1]), "scores": []}
        )
        if row["score"] is not None:
            entry["scores"].append([row["scorer"], vocabulary.place(row["judge"] or ""), *_interval_of(row)])
    return list(entries.values())


def _interval_of(row: Mapping[str, Any]) -> list[Any]:
    return [brief(row["score"]), brief(row["low"]), brief(row["high"]), row["cases"]]
