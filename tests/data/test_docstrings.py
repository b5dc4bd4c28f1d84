from itertools import islice

import pytest

from clearhead.data import docstrings
from clearhead.data.docstrings import MIN_CHARACTERS, PACKAGES, documents, fingerprint, word_runs


@pytest.fixture(scope="module")
def beginnings():
    return {split: list(islice(documents(split), 450)) for split in ("train", "held_out")}


def test_held_out_packages_share_under_two_percent_of_word_runs(beginnings):
    train = {run for document in beginnings["train"] for run in word_runs(document.text)}
    held_out = [run for document in beginnings["held_out"] for run in word_runs(document.text)]
    assert len(held_out) > 30_000
    assert sum(run in train for run in held_out) / len(held_out) < 0.02


def test_documents_are_long_distinct_and_of_their_packages(beginnings):
    for split, found in beginnings.items():
        assert all(len(document.text) >= MIN_CHARACTERS for document in found)
        assert len({document.text for document in found}) == len(found)
        packages = set(PACKAGES[split]) - {"python"}
        roots = {document.name.split("/")[0] for document in found}
        assert packages <= roots
    assert not set(PACKAGES["train"]) & set(PACKAGES["held_out"])


def test_near_duplicates_are_left_out(beginnings):
    seen = set()
    for document in beginnings["train"]:
        runs = word_runs(document.text)
        assert sum(run in seen for run in runs) <= docstrings.MAX_SEEN_SHARE * len(runs)
        seen.update(runs)


def test_any_beginning_is_varied(beginnings):
    roots = [document.name.split("/")[0] for document in beginnings["train"][:100]]
    assert len(set(roots)) >= 10
    assert max(roots.count(root) for root in set(roots)) <= 15


def test_the_order_is_stable(beginnings):
    assert list(islice(documents("held_out"), 10)) == beginnings["held_out"][:10]


def test_nothing_is_imported(tmp_path, monkeypatch):
    package = tmp_path / "trap"
    package.mkdir()
    words = " ".join(f"word{number}" for number in range(60))
    (package / "__init__.py").write_text(f'"""{words}"""\nraise SystemExit("imported")\n')
    (package / "broken.py").write_text(f'"""{words} more"""\ndef f(:\n')
    (package / "inner.py").write_text(f'class A:\n    async def f(self):\n        """Other {words[::-1]}"""\n')
    monkeypatch.setattr(docstrings, "_sources", lambda name: package if name == "torch" else None)
    assert sorted(document.name for document in documents("train")) == ["trap/__init__.py", "trap/inner.py:A.f"]


def test_no_package_at_all_is_an_error(monkeypatch):
    monkeypatch.setattr(docstrings, "_sources", lambda name: None)
    with pytest.raises(docstrings.ClearheadError, match="networkx.*--text"):
        documents("held_out")


def test_the_fingerprint_names_versions(monkeypatch):
    before = fingerprint("train")
    assert "torch 2" in before and "networkx" not in before
    monkeypatch.setattr(docstrings, "_version", lambda name: "9.9")
    assert fingerprint("train") != before
