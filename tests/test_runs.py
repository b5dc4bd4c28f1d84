import json
import os
import subprocess
import sys

import pytest

from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError
from clearhead.runs import RunDirectory, environment, progress, read_json, write_json, written_aside


def test_json_round_trip_keeps_any_text(tmp_path):
    value = {"a": [1, 2.5, None, True], "token": "\u202e</script>\u200b"}
    write_json(tmp_path / "deep" / "x.json", value)
    assert read_json(tmp_path / "deep" / "x.json") == value


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"\xff\xfe{}"])
def test_corrupt_json_names_the_file(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="config.json is not valid JSON"):
        read_json(path)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"fvu": float("nan")}, "fvu is nan"),
        ({"config": {"lr": float("inf")}}, "config.lr is inf"),
        ({"by_position": [0.0, -float("inf")]}, r"by_position\[1\] is -inf"),
        (float("nan"), "the value is nan"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_key(tmp_path, value, key):
    with pytest.raises(NonFiniteError, match=f"{key} and was not written to .*x.json"):
        write_json(tmp_path / "x.json", value)
    assert os.listdir(tmp_path) == []


def test_metrics_that_are_not_finite_are_refused_by_name(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.log(step=1, loss=0.5)
        with pytest.raises(NonFiniteError, match="loss is nan .*metrics.jsonl"):
            run.log(step=2, loss=float("nan"))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_missing_json_is_a_clear_error(tmp_path):
    with pytest.raises(ClearheadError, match="there is no file"):
        read_json(tmp_path / "none.json")


def test_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "weights"
    path.write_text("old")
    with pytest.raises(RuntimeError), written_aside(path) as aside:
        aside.write_text("half")
        raise RuntimeError("killed")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["weights"]


def test_full_disk_keeps_the_old_file_and_says_so(tmp_path):
    path = tmp_path / "weights"
    path.write_text("old")
    with pytest.raises(ClearheadError, match="no space left on the disk"), written_aside(path) as aside:
        aside.symlink_to("/dev/full")
        aside.write_text("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["weights"]


def test_two_processes_cannot_own_one_directory(tmp_path):
    code = "import sys; from clearhead.runs import RunDirectory; RunDirectory(sys.argv[1]).__enter__()"
    with RunDirectory(tmp_path):
        second = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert second.returncode != 0
    assert "another process is writing" in second.stderr
    assert "--out" in second.stderr
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_killed_owner_frees_the_directory(tmp_path):
    code = (
        "import os, signal, sys; from clearhead.runs import RunDirectory\n"
        "RunDirectory(sys.argv[1]).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert killed.returncode == -9
    with RunDirectory(tmp_path):
        pass


def test_metrics_are_cut_back_to_the_resumed_step(tmp_path):
    with RunDirectory(tmp_path) as run:
        for step in (1, 2, 3):
            run.log(step=step, loss=1 / step)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "lo')
        run.truncate_metrics(2)
        run.log(step=3, loss=0.5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] == 0.5


def test_run_directory_holds_config_environment_and_summary(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.write_config({"schema": 1})
        run.write_summary({"fvu": 0.2})
    assert read_json(tmp_path / "config.json") == {"schema": 1}
    assert read_json(tmp_path / "summary.json") == {"fvu": 0.2}
    env = read_json(tmp_path / "env.json")
    assert env["versions"]["torch"]
    assert env["python"] == environment()["python"]


def test_progress_off_a_terminal_prints_lines_with_rate_and_a_last_one(capsys):
    with progress("train", 100, done=40, every=0) as advance:
        advance(20)
        advance(40)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("train: 60 of 100 tokens, ")
    assert lines[0].endswith("s left")
    assert lines[1].startswith("train: 100 of 100 tokens, ")


def test_progress_off_a_terminal_is_quiet_in_between(capsys):
    with progress("train", 100) as advance:
        for _ in range(100):
            advance(1)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_progress_on_a_terminal_is_a_bar_with_time_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress("train", 2000) as advance:
        advance(1000)
    shown = capsys.readouterr().err
    assert "train:  50%" in shown or "train:   0%" in shown
    assert "tokens" in shown
