"""Gendered pronoun: a person is named, and what follows is "he" or "she".

    So Evan is such a great friend, isn't  ->  " he", not " she"

The corrupt prompt names a person of the other gender (corruption "name"), so that the answer changes sides. Names are
those that English texts give to men or to women almost always; a name of several tokens is kept where the other has
equally many. Items alternate between men and women in every template. Labels: name, end.

Task as in Mathwin et al. 2023 (a circuit for gendered pronouns in GPT-2 small), whose sentence is the first template;
the other sentences and the names are our own.
"""

from clearhead.data import templates
from clearhead.data.task_item import TaskItem
from clearhead.data.templates import Lot
from clearhead.model.access import Model

TEMPLATES = (
    "So {name} is such a {quality} {role}, isn't",
    "Everyone knows that {name} is a {quality} {role}, doesn't",
    "Yesterday {name} stayed in bed all day because",
    "We asked {name} about the new {role}, but",
    "When {name} came home from work,",
    "As soon as {name} saw the {role},",
    "Although {name} was a {quality} {role},",
    "Last week {name} told me that",
)
MEN = (
    "Adam Albert Andrew Anthony Arthur Ben Brian Carl Charles Christopher Daniel David Edward Eric Evan Frank Fred "
    "George Harry Henry Jack Jacob James Jason John Joseph Kevin Mark Martin Matthew Michael Nathan Nick Oliver Oscar "
    "Paul Peter Philip Richard Robert Simon Stephen Steven Thomas Tom Victor Walter William"
)
WOMEN = (
    "Alice Amanda Amy Angela Anna Anne Barbara Betty Carol Caroline Catherine Charlotte Christine Clara Diana Dorothy "
    "Elizabeth Ellen Emily Emma Eva Hannah Helen Jane Jennifer Jessica Julia Karen Kate Laura Linda Lisa Lucy Margaret "
    "Maria Martha Mary Michelle Nancy Rachel Rebecca Ruth Sandra Sarah Sophie Susan"
)
QUALITIES = "great good kind nice brilliant wonderful careful funny friendly clever"
ROLES = "friend teacher doctor writer student lawyer singer dancer player driver"
CORRUPTIONS = ("name",)
MAN_DRAW, WOMAN_DRAW, QUALITY_DRAW, ROLE_DRAW = range(4)


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items. Raises `UnknownNameError` for another corruption, `ClearheadError` where the tokenizer takes none."""
    templates.chosen("pronoun", corrupt, CORRUPTIONS)

    def make(lot: Lot) -> TaskItem:
        number, swapped = lot.index // 2 % len(TEMPLATES), lot.index % 2
        people = [(lot.one_of(MAN_DRAW, MEN.split()), " he"), (lot.one_of(WOMAN_DRAW, WOMEN.split()), " she")]
        (name, pronoun), (other, wrong) = reversed(people) if swapped else people
        words = {
            "quality": lot.one_of(QUALITY_DRAW, QUALITIES.split()),
            "role": lot.one_of(ROLE_DRAW, ROLES.split()),
        }
        return templates.fill(
            model,
            TEMPLATES[number],
            words | {"name": name},
            words | {"name": other},
            name=f"pronoun {number}",
            answers=[pronoun],
            wrong_answers=[wrong],
            labels=["name"],
        )

    return templates.generate("pronoun", model, n, seed, make)
