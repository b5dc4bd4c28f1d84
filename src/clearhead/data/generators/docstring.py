"""Docstring: the arguments of a Python function are described in their order, and the next one is due.

    def open(self, width, size, name, path, mode, line):
        read time

        :param name: set long
        :param path: old state
        :param                   ->  " mode", not " width", " size", " name", " path", " line"

(three quotes open the docstring, in the prompt). Of six arguments A, B and C are described, A and B in the prompt, C
next; two stand before them and one behind, so that neither the first nor the last argument is the answer. The corrupt
prompt keeps everything but names:

    arguments    A, B, C in the definition and A, B in the docstring become five other words
    definition   A, B, C in the definition become other words; the docstring still names A and B
    docstring    A, B in the docstring become other words; the definition still has them

Templates are five ways to write a docstring, two of them with the function at top level, where one more word replaces
`self`. Names and words are single tokens behind a space. Labels: A_def, B_def, C_def, A_doc, B_doc, end.

Task as in Heimersheim & Janiak 2023 (a circuit for Python docstrings in a 4-layer attention-only transformer), whose
layout is the first template; words are our own.
"""

from clearhead.data import templates
from clearhead.data.task_item import TaskItem
from clearhead.data.templates import Lot
from clearhead.model.access import Model

BODY = (
    '{first}, {second}, {A_def}, {B_def}, {C_def}, {last}):\n    """{w0} {w1} {w2}\n\n'
    "    {mark} {A_doc}: {w3} {w4}\n    {mark} {B_doc}: {w5} {w6}\n    {mark}"
)
GOOGLE = (
    '{first}, {second}, {A_def}, {B_def}, {C_def}, {last}):\n    """{w0} {w1} {w2}\n\n    Args:\n'
    "        {A_doc}: {w3} {w4}\n        {B_doc}: {w5} {w6}\n       "
)
TEMPLATES = (
    "\ndef {name}(self, " + BODY.replace("{mark}", ":param"),
    "\ndef {name}(self, " + BODY.replace("{mark}", "@param"),
    "\ndef {name}({zeroth}, " + BODY.replace("{mark}", ":param"),
    "\ndef {name}({zeroth}, " + BODY.replace("{mark}", ":arg"),
    "\ndef {name}(self, " + GOOGLE,
)
WORDS = (
    "action address age amount angle area base block body book box call card case cell check city class clean code "
    "color column command context count country cover cross current data date day depth door end error event factor "
    "field file first flag format frame full function group hand head height home house image index input item job key "
    "kind label land language last left length letter level limit line link list load lock log long low map mark match "
    "mode model month name new next node note number object offset old open option order owner page parent part path "
    "place plan plane point port position power price process product project query range rate read region result "
    "return right role root row rule scale score search second section seed server set shape side size source space "
    "speed stage start state status step stop string style sum system table tag target team term test text time title "
    "token top total tree type unit update user value version view volume weight width window word work write year zone"
)
CORRUPTIONS = ("arguments", "definition", "docstring")
WORD_DRAW = 0
PLAIN = ("name", "zeroth", "first", "second", "last", *(f"w{number}" for number in range(7)))


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items. Raises `UnknownNameError` for another corruption, `ClearheadError` where the tokenizer takes none."""
    corruption = templates.chosen("docstring", corrupt, CORRUPTIONS)
    words = templates.single_tokens(model, WORDS.split(), at_least=len(PLAIN) + 8, task="docstring")

    def make(lot: Lot) -> TaskItem:
        template = lot.turn(TEMPLATES)
        drawn = lot.shuffled(WORD_DRAW, words)
        a, b, c, *others = drawn[:8]
        clean = dict(zip(PLAIN, drawn[8:], strict=False))
        clean |= {"A_def": a, "B_def": b, "C_def": c, "A_doc": a, "B_doc": b}
        changed = {
            "definition": dict(zip(("A_def", "B_def", "C_def"), others, strict=False)),
            "docstring": dict(zip(("A_doc", "B_doc"), others[3:], strict=True)),
        }
        changed["arguments"] = changed["definition"] | changed["docstring"]
        wrong = [clean[slot] for slot in ("first", "second", "A_def", "B_def", "last", "zeroth") if slot in template]
        return templates.fill(
            model,
            template,
            clean,
            clean | changed[corruption],
            name=f"docstring {TEMPLATES.index(template)}",
            answers=[f" {c}"],
            wrong_answers=[f" {word}" for word in wrong],
            labels=["A_def", "B_def", "C_def", "A_doc", "B_doc"],
        )

    return templates.generate("docstring", model, n, seed, make)
