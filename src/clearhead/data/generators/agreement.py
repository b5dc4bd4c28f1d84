"""Subject-verb agreement past an attractor: the verb agrees with the subject, not with the noun that is nearer to it.

    The author near the lakes  ->  " is", " was", " has", not " are", " were", " have"

Subject and attractor are each singular or plural, all four equally often, so that a model which agrees with the nearer
noun is right in half of the prompts: the template of an item says whether the numbers are "equal" or "different". The
corrupt prompt is

    subject   the subject in the other number, so that the answer changes sides
    both      subject and attractor in the other number: the mirror image

Labels: subject, attractor (the last token of each), end. The phenomenon as in Linzen et al. 2016 (1611.01368); the
sentences and nouns are our own.
"""

from clearhead.data import templates
from clearhead.data.task_item import TaskItem
from clearhead.data.templates import Lot
from clearhead.model.access import Model

TEMPLATES = (
    "The {subject} near the {attractor}",
    "The {subject} behind the {attractor}",
    "I think that the {subject} next to the {attractor}",
    "Every morning the {subject} beside the {attractor}",
    "We noticed that the {subject} in front of the {attractor}",
    "The {subject} who visited the {attractor}",
)
SUBJECTS = (
    "author actor artist boy girl child doctor driver farmer friend guard king lawyer man woman manager officer pilot "
    "player singer student teacher worker writer"
)
ATTRACTORS = "car tree house table boat bridge tower building train wall garden river lake hotel school statue"
IRREGULAR = {"child": "children", "man": "men", "woman": "women"}
VERBS = ((" is", " was", " has"), (" are", " were", " have"))
CORRUPTIONS = ("subject", "both")
SUBJECT_DRAW, ATTRACTOR_DRAW = range(2)


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items. Raises `UnknownNameError` for another corruption, `ClearheadError` where the tokenizer takes none."""
    corruption = templates.chosen("agreement", corrupt, CORRUPTIONS)

    def make(lot: Lot) -> TaskItem:
        number = lot.index // 4 % len(TEMPLATES)
        plural, near = lot.index % 2, lot.index // 2 % 2
        subject = _numbers(lot.one_of(SUBJECT_DRAW, SUBJECTS.split()))
        attractor = _numbers(lot.one_of(ATTRACTOR_DRAW, ATTRACTORS.split()))
        mirrored = 1 - near if corruption == "both" else near
        return templates.fill(
            model,
            TEMPLATES[number],
            {"subject": subject[plural], "attractor": attractor[near]},
            {"subject": subject[1 - plural], "attractor": attractor[mirrored]},
            name=f"agreement {number} {'equal' if plural == near else 'different'}",
            answers=VERBS[plural],
            wrong_answers=VERBS[1 - plural],
            labels=["subject", "attractor"],
        )

    return templates.generate("agreement", model, n, seed, make)


def _numbers(noun: str) -> tuple[str, str]:
    return noun, IRREGULAR.get(noun, f"{noun}s")
