"""An item of a task in the tokens of one model, or the reason why it has none.

An item can be taken where clean and corrupt prompt have equally many tokens, every label lies at the token that it was
made for, and each answer is one token that leaves the tokens of the prompt as they are. Nothing is cut or padded.
"""

from typing import NamedTuple

from clearhead.data.task_item import TaskItem
from clearhead.model.access import Model


class TokenIds(NamedTuple):
    """An item in a model's tokens."""

    clean: list[int]
    corrupt: list[int]
    answers: list[int]
    wrong_answers: list[int]


def tokenised(model: Model, item: TaskItem) -> TokenIds | str:
    """The item's token ids, or why it has none."""
    clean, corrupt = token_ids(model, item.clean), token_ids(model, item.corrupt)
    if len(clean) != len(corrupt):
        return "clean and corrupt differ in length"
    if model.n_ctx is not None and len(clean) > model.n_ctx:
        return "longer than the model's context"
    if any(index >= len(clean) for index in item.labels.values()):
        return "a label lies behind the last token"
    if item.label_tokens:
        names = list(item.label_tokens)
        if model.token_strings(clean[item.labels[name]] for name in names) != list(item.label_tokens.values()):
            return "labels of another tokenizer"
    answers = [continuation(model, item.clean, clean, text) for text in item.answers]
    wrong = [continuation(model, item.clean, clean, text) for text in item.wrong_answers]
    if None in answers:
        return "an answer of several tokens"
    if None in wrong:
        return "a wrong answer of several tokens"
    if set(answers) & set(wrong):
        return "an answer that is also a wrong answer"
    return TokenIds(clean, corrupt, [a for a in answers if a is not None], [w for w in wrong if w is not None])


def continuation(model: Model, prompt: str, ids: list[int], answer: str) -> int | None:
    """The token that `answer` is behind the prompt; None where it is several, or changes the prompt's own tokens."""
    both = token_ids(model, prompt + answer)
    return both[-1] if both[:-1] == ids else None


def token_ids(model: Model, text: str) -> list[int]:
    """The ids of one text, special tokens included."""
    return model.tokenize(text)[0].tolist()
