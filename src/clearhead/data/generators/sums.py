"""Two-digit addition in text: which number, or which first digit, ends a sum.

    37 + 48 =  ->  " 85"

What is asked for depends on how the tokenizer cuts numbers, nothing else differs (as in greater_than.py):

    whole numbers   every number to 198 is one token behind the prompt: the answer is the sum
    single digits   digits are tokens (SmolLM2): the answer is the first digit of the sum. Where a number begins with a
                    token for its space, that space ends the prompt

The corrupt prompt has another second summand whose sum has another answer (corruption "summand"), which is the wrong
answer. Summands are 10 to 99. Labels: a, b (the last token of each), end. Not here: sums digit by digit without a
tokenizer, for a model of their own (data/addition.py).
"""

from clearhead.data import templates
from clearhead.data.generators.greater_than import continuations
from clearhead.data.task_item import TaskItem
from clearhead.data.templates import Lot
from clearhead.errors import ClearheadError
from clearhead.model.access import Model

TEMPLATES = (
    "{a} + {b} =",
    "{a}+{b}=",
    "The sum of {a} and {b} is",
    "Question: What is {a} plus {b}? Answer: {a} plus {b} is",
    "11 + 12 = 23, 40 + 50 = 90, 35 + 27 = 62, {a} + {b} =",
)
SUMMANDS = range(10, 100)
CORRUPTIONS = ("summand",)
A_DRAW, B_DRAW, OTHER_DRAW = range(3)


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items.

    Raises `UnknownNameError` for another corruption, `ClearheadError` where the tokenizer cuts numbers neither into
    wholes nor into digits.
    """
    templates.chosen("addition", corrupt, CORRUPTIONS)
    forms = {template: _form(model, template) for template in TEMPLATES}

    def make(lot: Lot) -> TaskItem:
        template = lot.turn(TEMPLATES)
        ending, lead, whole = forms[template]
        a = lot.one_of(A_DRAW, SUMMANDS)
        b, other = lot.one_of(B_DRAW, SUMMANDS), lot.one_of(OTHER_DRAW, SUMMANDS)
        right, wrong = (str(a + summand) if whole else str(a + summand)[0] for summand in (b, other))
        return templates.fill(
            model,
            template + ending,
            {"a": str(a), "b": str(b)},
            {"a": str(a), "b": str(other)},
            name=f"addition {TEMPLATES.index(template)} {'whole' if whole else 'first digit'}",
            answers=[lead + right],
            wrong_answers=[lead + wrong],
            labels=["a", "b"],
        )

    return templates.generate("addition", model, n, seed, make)


def _form(model: Model, template: str) -> tuple[str, str, bool]:
    """What ends the prompt, what begins the answer, and whether that is a whole number. Raises where nothing fits."""
    prompt = template.format(a=37, b=48)
    spaces = (("", ""),) if template.endswith("}=") else (("", " "), (" ", ""))
    for whole, numbers in ((True, range(2 * SUMMANDS[0], 2 * SUMMANDS[-1] + 1)), (False, range(1, 10))):
        for ending, lead in spaces:
            texts = [f"{lead}{number}" for number in numbers]
            if continuations(model, prompt + ending, texts) == texts:
                return ending, lead, whole
    raise ClearheadError(
        f"addition: the tokenizer of {model.name} cuts the numbers behind {prompt!r} neither into whole numbers nor "
        "into single digits; take a model that does, such as smollm2"
    )
