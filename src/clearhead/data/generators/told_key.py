"""Passkey as a task: a key word is told, other sentences follow, and the key is asked for.

    The pass key is garden. ... The hills are far away. ... The pass key is  ->  " garden"

One to four sentences of filler stand before the key and as many or fewer behind it, drawn anew for each item, so that
no head finds it at a fixed distance. The corrupt prompt tells another key (corruption "key"), which is the wrong
answer. The key is a word that is one token behind a space. Labels: key, end.

This is the short, single-token form of data/passkey.py, for patching; that module measures long contexts.
"""

from clearhead.data import templates
from clearhead.data.task_item import TaskItem
from clearhead.data.templates import Lot
from clearhead.model.access import Model

TEMPLATES = (
    "Keep the pass key in mind.{before} The pass key is {key}.{behind} What is the pass key? The pass key is",
    "This is a test of memory.{before} The secret word is {key}.{behind} So, once more, the secret word is",
    "Read the text and answer.{before} Tom's favorite word is {key}.{behind} Question: what is Tom's favorite word?"
    " Answer: Tom's favorite word is",
    "They agreed on a sign.{before} The sign for help is {key}.{behind} Do not forget it: the sign for help is",
)
FILLER = (
    "The river is wide.",
    "The hills are far away.",
    "A boat goes down, and a boat comes up.",
    "So it was every day.",
    "The sky was grey and the wind was cold.",
    "Nobody came to the door.",
    "The old clock stood still.",
    "Some birds sat on the roof.",
)
KEYS = (
    "apple bird boat book bottle box bread bridge cake camera car cat chair clock cloud coat coin dog door dress duck "
    "egg farm fish flower forest frog game garden gold hat hill horse house key king lake lamp leaf letter lion milk "
    "moon mountain mouse paper pen picture plant queen rain ring river road rock rose salt sand school sea ship shoe "
    "silver snow spoon star stone storm sugar sun table ticket tiger train tree wall water wheel window winter wolf"
)
CORRUPTIONS = ("key",)
KEY_DRAW, FILLER_DRAW, BEFORE_DRAW, BEHIND_DRAW = range(4)


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items. Raises `UnknownNameError` for another corruption, `ClearheadError` where the tokenizer takes none."""
    templates.chosen("passkey", corrupt, CORRUPTIONS)
    keys = templates.single_tokens(model, KEYS.split(), at_least=2, task="passkey")

    def make(lot: Lot) -> TaskItem:
        template = lot.turn(TEMPLATES)
        key, other, *_ = lot.shuffled(KEY_DRAW, keys)
        filler = lot.shuffled(FILLER_DRAW, FILLER)
        before = 1 + lot.one_of(BEFORE_DRAW, range(4))
        behind = 1 + lot.one_of(BEHIND_DRAW, range(before))
        words = {
            "before": "".join(f" {sentence}" for sentence in filler[:before]),
            "behind": "".join(f" {sentence}" for sentence in filler[before : before + behind]),
        }
        return templates.fill(
            model,
            template,
            words | {"key": key},
            words | {"key": other},
            name=f"passkey {TEMPLATES.index(template)}",
            answers=[f" {key}"],
            wrong_answers=[f" {other}"],
            labels=["key"],
        )

    return templates.generate("passkey", model, n, seed, make)
