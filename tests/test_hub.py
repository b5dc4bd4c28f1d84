import errno
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead import hub
from clearhead.errors import ClearheadError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CLEARHEAD_CACHE": "/a"}, "/a"),
        ({"CLEARHEAD_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/clearhead"),
        ({"HOME": "/c"}, "/c/.cache/clearhead"),
    ],
)
def test_cache_follows_the_environment(monkeypatch, environment, expected):
    for name in ("CLEARHEAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_dir() == Path(expected)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
@pytest.mark.parametrize("name", ["CLEARHEAD_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_follows_either_variable(monkeypatch, name, value, expected):
    monkeypatch.delenv("CLEARHEAD_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv(name, value)
    assert hub.offline() is expected


def test_build_once_builds_once_and_whole(tmp_path):
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        assert not (tmp_path / "made").exists()
        (folder / "file").write_text("content")

    for _ in range(2):
        assert (hub.build_once(tmp_path / "made", build) / "file").read_text() == "content"
    assert len(calls) == 1


def test_a_failed_build_leaves_nothing_and_the_next_succeeds(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        hub.build_once(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]
    assert hub.build_once(tmp_path / "made", lambda folder: (folder / "file").touch()).is_dir()


def test_leftovers_of_a_killed_build_are_cleared(tmp_path):
    (tmp_path / ".made.part").mkdir()
    (tmp_path / ".made.part" / "old").touch()
    made = hub.build_once(tmp_path / "made", lambda folder: (folder / "new").touch())
    assert [path.name for path in made.iterdir()] == ["new"]


def test_a_full_disk_is_named(tmp_path):
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ClearheadError, match="no space left.*CLEARHEAD_CACHE"):
        hub.build_once(tmp_path / "made", fill)


def test_processes_that_ask_at_once_build_once(tmp_path):
    code = (
        "import pathlib, sys; from clearhead.hub import build_once; made = pathlib.Path(sys.argv[1])\n"
        "def build(folder):\n"
        "    with (made.parent / 'builds').open('a') as file: file.write('built')\n"
        "build_once(made, build)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "made")]) for _ in range(3)]
    assert [process.wait(30) for process in processes] == [0] * 3
    assert (tmp_path / "builds").read_text() == "built"


def test_sha256_of_is_that_of_the_bytes(tmp_path):
    (tmp_path / "empty").touch()
    assert hub.sha256_of(tmp_path / "empty") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
