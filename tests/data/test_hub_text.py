import json

import pytest

from clearhead.data import hub_text
from clearhead.errors import ClearheadError


@pytest.fixture
def dataset(tmp_path):
    """A local folder in the layout of a hub dataset; `datasets` reads both alike."""

    def make(field="text", **splits):
        folder = tmp_path / "dataset"
        folder.mkdir()
        for split, count in splits.items():
            rows = [json.dumps({field: f"{split} {number}"}) for number in range(count)]
            (folder / f"{split}.jsonl").write_text("\n".join(rows))
        return str(folder)

    return make


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


def _texts(name, split):
    return [document.text for document in hub_text.documents(name, split)]


def test_validation_is_held_out_where_there_is_one(dataset):
    name = dataset(train=12, validation=3, test=2)
    assert _texts(name, "train") == [f"train {number}" for number in range(12)]
    assert _texts(name, "held_out") == [f"validation {number}" for number in range(3)]


def test_else_one_row_in_ten_is(dataset):
    name = dataset(train=300)
    train, held_out = _texts(name, "train"), _texts(name, "held_out")
    assert sorted(train + held_out) == sorted(f"train {number}" for number in range(300))
    assert 12 <= len(held_out) <= 50


def test_columns_and_splits_that_are_missing_are_named(dataset):
    with pytest.raises(ClearheadError, match="columns body; expected a string in 'text'"):
        _texts(dataset(field="body", train=2), "train")


def test_a_dataset_without_train_lists_its_splits(dataset):
    with pytest.raises(ClearheadError, match="has the splits test; expected one named 'train'"):
        _texts(dataset(test=2), "train")


def test_an_unknown_configuration_lists_those_there_are(dataset):
    with pytest.raises(ClearheadError, match="'none' not found. Available: .*default"):
        _texts(dataset(train=2) + ":none", "train")


def test_offline_names_the_variable_and_the_alternatives(monkeypatch):
    monkeypatch.setattr(hub_text, "is_offline_mode", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ClearheadError, match="'nobody/none' cannot be read: HF_HUB_OFFLINE is set.*--text default"):
        _texts("nobody/none", "train")


def test_our_own_variable_is_honoured(monkeypatch):
    monkeypatch.setenv("CLEARHEAD_OFFLINE", "1")
    monkeypatch.setattr(hub_text, "is_offline_mode", lambda: False)
    with pytest.raises(ClearheadError, match="set HF_HUB_OFFLINE=1"):
        _texts("nobody/none", "train")
