from dataclasses import replace

import pytest

from clearhead.data.task_description import describe_task
from clearhead.data.tasks import Task, measure, open_task, task
from clearhead.errors import UnknownNameError
from tests.data.word_model import word_model


def test_a_description_is_the_measures_of_both_prompts_by_template():
    model = word_model()
    items = task("ioi", model, 8, corrupt="s2_flip").items
    other = replace(items[0], corrupt="to")
    made = Task.of_items("mixed", model, (*items, items[0], other), {"a row without a corrupt prompt": 2})
    found = describe_task(model, made)
    assert found.to_dict()["prompts"] == 9 and found.distinct == 8 and found.to_dict()["refused"] == 3
    assert found.clean.refused["a row without a corrupt prompt"] == 2
    swapped = Task.of_items("s", model, tuple(replace(i, clean=i.corrupt, label_tokens={}) for i in (*items, items[0])))
    assert found.corrupt.mean_difference == pytest.approx(measure(model, swapped).mean_difference, abs=1e-6)
    assert sum(result.prompts for result in found.by_template.values()) == 9
    mean = sum(result.prompts * result.mean_difference for result in found.by_template.values()) / 9
    assert mean == pytest.approx(found.clean.mean_difference, abs=1e-6)
    assert list(found.wrong) == found.clean.wrong and found.example == items[0]
    assert found.labels == ("IO", "S1", "S1+1", "S2", "end")


def test_a_task_is_opened_by_name_or_file(tmp_path):
    model = word_model()
    made = open_task("ioi", model, 3, seed=4)
    assert made == task("ioi", model, 3, seed=4)
    made.save(tmp_path / "ioi.jsonl")
    assert open_task(str(tmp_path / "ioi.jsonl"), model) == made
    with pytest.raises(UnknownNameError, match="unknown task 'io'"):
        open_task("io", model)
