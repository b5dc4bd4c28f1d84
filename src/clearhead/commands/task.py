"""`clearhead task`: what a model makes of a task, built-in or of a file, and the task as JSON lines.

Prints counts, refusals by their reason, accuracy and logit differences over all prompts and by template, one prompt
with its answers, and the prompts that the model gets wrong. Writes nothing but the file that --out names.
"""

from typing import Any

from clearhead.commands.printing.table import say, show, spelled
from clearhead.config import DescribeTask
from clearhead.config.task import is_file
from clearhead.data.task_description import TaskDescription, describe_task
from clearhead.data.task_item import TaskItem
from clearhead.data.tasks import TASKS, open_task
from clearhead.errors import UnknownNameError
from clearhead.model.access import Model

SHOWN = 5
"""Wrong prompts in full."""


def plan(config: DescribeTask) -> dict[str, Any]:
    """What will be measured, without loading a model."""
    if not is_file(config.task) and config.task not in TASKS:
        raise UnknownNameError("task", config.task, TASKS, "A file ends in .jsonl, .json, .csv or .parquet.")
    return {
        "task": config.task,
        "model": config.model,
        "prompts": "all of the file" if is_file(config.task) else config.prompts,
        "forwards per prompt": 2,
        "written to": config.out,
    }


def run(config: DescribeTask) -> None:
    """Measure, print, write the prompts where asked to."""
    plan(config)
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    behaviour = open_task(config.task, model, config.prompts, config.seed, corrupt=config.corrupt)
    found = describe_task(model, behaviour)
    numbers = found.to_dict()
    shown = {name: value for name, value in numbers.items() if name not in ("refused_by_reason", "wrong_items")}
    show({name.replace("_", " "): value for name, value in shown.items()}, "measured:")
    if found.clean.refused:
        show(found.clean.refused, "refused:")
    show(_templates(found), "by template: prompts, accuracy, logit difference, that of the corrupt prompts:")
    show(_prompt(found.example), "a prompt:")
    if found.wrong:
        say(f"wrong: {len(found.wrong)} of {len(found.clean.items)}, items {spelled(list(found.wrong))}")
        for item in list(found.wrong.values())[:SHOWN]:
            say(f"  {item.clean!r} → {_words(item.wrong_answers)}, not {_words(item.answers)}")
    if config.out is not None:
        behaviour.save(config.out)
        say(f"prompts: {config.out}")


def _templates(found: TaskDescription) -> dict[str, list[float]]:
    return {
        name: [result.prompts, result.accuracy, result.mean_difference, result.mean_corrupt_difference]
        for name, result in found.by_template.items()
    }


def _prompt(item: TaskItem) -> dict[str, str]:
    return {
        "clean": repr(item.clean),
        "corrupt": repr(item.corrupt),
        "answers": _words(item.answers),
        "wrong answers": _words(item.wrong_answers),
    }


def _words(texts: tuple[str, ...]) -> str:
    """The first few of the texts."""
    few = ", ".join(repr(text) for text in texts[:SHOWN])
    return few if len(texts) <= SHOWN else f"{few}, ... ({len(texts)})"
