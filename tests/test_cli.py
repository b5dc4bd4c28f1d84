import dataclasses
import errno
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from clearhead import cli, runs
from clearhead.config import VERBS, Evaluate, TrainLorsa, View
from clearhead.errors import UnknownNameError

OPTIONS = Path(__file__).with_name("options.txt")
RENEW = "if the change is meant, renew the list: CLEARHEAD_RENEW=1 python -m pytest tests/test_cli.py -k options_are"


def help_of(capsys, verb):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*verb.split(), "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def spelled(hint):
    if get_origin(hint) is Annotated:
        return "positional " + spelled(get_args(hint)[0])
    return re.sub(r"typing\.|pathlib\.|_local\.|<class '(\w+)'>", r"\1", str(hint))


def option_lines():
    for verb, cls in VERBS.items():
        hints = get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default}"
            yield f"{verb} --{field.name.replace('_', '-')}: {spelled(hints[field.name])}{default}"


def test_options_are_those_on_the_list():
    listed = "\n".join(option_lines()) + "\n"
    if os.environ.get("CLEARHEAD_RENEW"):
        OPTIONS.write_text(listed)
    assert OPTIONS.read_text() == listed, RENEW


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_shows_every_option_and_its_text(verb, capsys):
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", help_of(capsys, verb)).split())
    assert f"usage: clearhead {verb}" in shown
    for field in dataclasses.fields(VERBS[verb]):
        nameless = ("runs", "graphs") if verb != "catalogue" else ("run",)  # given by place, without a name
        if field.default is not dataclasses.MISSING and field.name not in nameless:
            assert f"--{field.name.replace('_', '-')}" in shown
    assert "--from" in shown and "--dry-run" in shown
    # attribute docstrings arrive whole
    assert "Directory written by `clearhead train lorsa`; of one with a run per layer" in shown or verb != "analyze"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENAMETOOLONG])
def test_places_that_cannot_be_written_are_one_line(number, monkeypatch, capsys, tmp_path):
    def fail(_):
        raise OSError(number, "no such place", str(tmp_path / "there"))

    monkeypatch.setattr("clearhead.commands.view.run", fail)
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "cannot use" in capsys.readouterr().err


def test_overview_lists_every_verb_on_one_short_line(capsys):
    assert cli.main([]) == 0
    bare = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == bare
    lines = bare.splitlines()
    for verb in VERBS:
        assert sum(re.match(rf"  {verb}  ", line) is not None for line in lines) == 1
    assert max(map(len, lines)) <= 120


def test_a_group_of_verbs_lists_its_own(capsys):
    assert cli.main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert "bench lorsa" in shown and "bench zpattern" in shown and "evaluate" not in shown


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"clearhead \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_verbs_are_found_by_one_or_two_words():
    assert cli.find_verb(["train", "lorsa", "--k", "3"]) == (TrainLorsa, ["--k", "3"])
    assert cli.find_verb(["view", "runs/x"]) == (View, ["runs/x"])
    with pytest.raises(UnknownNameError, match="unknown verb 'evalute'; did you mean 'evaluate'"):
        cli.find_verb(["evalute", "runs/x"])
    with pytest.raises(UnknownNameError, match="unknown verb 'train lorse'; did you mean 'train lorsa'"):
        cli.find_verb(["train", "lorse"])


def test_options_reach_the_configuration():
    config, dry_run = cli.parse(TrainLorsa, ["--layer", "-2", "--no-resume", "--init", "random", "--dry-run"])
    assert config == TrainLorsa(layer=-2, resume=False, init="random")
    assert dry_run
    config, dry_run = cli.parse(Evaluate, ["runs/x", "--text", "a.txt"])
    assert config == Evaluate(run=Path("runs/x"), text="a.txt")
    assert not dry_run


@pytest.mark.parametrize("spelling", [["--from", "{}"], ["--from={}"]])
def test_from_supplies_everything_but_what_is_named_and_the_directory(tmp_path, spelling):
    earlier = TrainLorsa(k=32, layer=3, bf16=True, out=tmp_path)
    runs.write_json(tmp_path / "config.json", earlier.to_dict())
    for place in (tmp_path, tmp_path / "config.json"):
        source = [word.format(place) for word in spelling]
        config, _ = cli.parse(TrainLorsa, [*source, "--layer", "None", "--no-bf16"])
        assert config == TrainLorsa(k=32, layer=None, bf16=False, out=None)


def test_from_supplies_positional_arguments_too(tmp_path):
    runs.write_json(tmp_path / "config.json", Evaluate(run=Path("runs/x"), tokens=7).to_dict())
    config, _ = cli.parse(Evaluate, ["--from", str(tmp_path), "--dtype", "bfloat16"])
    assert config == Evaluate(run=Path("runs/x"), tokens=7, dtype="bfloat16")


def test_from_another_verb_says_what_to_type(tmp_path, capsys):
    runs.write_json(tmp_path / "config.json", TrainLorsa().to_dict())
    assert cli.main(["view", "--from", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert f"type: clearhead train lorsa --from {tmp_path}" in shown


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trian", "lorsa"], "did you mean 'train lorsa'"),
        (["train", "lorsa", "--k", "0"], "--k 0 is not possible"),
        (["train", "lorsa", "--from", "nowhere/config.json"], "there is no file nowhere/config.json"),
    ],
)
def test_errors_of_input_are_one_message_and_status_2(args, says, capsys):
    assert cli.main(args) == 2
    shown = capsys.readouterr()
    assert says in shown.err and shown.err.startswith("clearhead: ") and "Traceback" not in shown.err
    assert shown.out == ""


def test_unknown_options_get_the_nearest_and_status_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "lorsa", "--btach-tokens", "512"])
    assert stopped.value.code == 2
    assert "--batch-tokens" in capsys.readouterr().err


def view_that(monkeypatch, run, plan=None):
    module = types.ModuleType("clearhead.commands.view")
    vars(module).update(run=run, plan=plan)
    monkeypatch.setitem(sys.modules, "clearhead.commands.view", module)


def test_the_verb_runs_with_its_configuration(monkeypatch):
    seen = []
    view_that(monkeypatch, seen.append)
    assert cli.main(["view", "runs/x"]) == 0
    assert seen == [View(run=Path("runs/x"))]


def test_dry_run_prints_the_plan_and_runs_nothing(monkeypatch, capsys):
    view_that(monkeypatch, None, lambda config: {"page": config.run / "page.html", "heads": 4608})
    assert cli.main(["view", "runs/x", "--dry-run"]) == 0
    assert capsys.readouterr().out == "  page   runs/x/page.html\n  heads  4,608\n"


@pytest.mark.parametrize("text", ["saved after step 12 of 90 in runs/x", ""])
def test_interrupt_is_status_130_and_says_what_was_saved(monkeypatch, capsys, text):
    def stop(_):
        raise KeyboardInterrupt(text) if text else KeyboardInterrupt

    view_that(monkeypatch, stop)
    assert cli.main(["view", "runs/x"]) == 130
    shown = capsys.readouterr().err
    assert (text or "no file was left half-written") in shown and "Traceback" not in shown


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def broken(_):
        raise ZeroDivisionError

    view_that(monkeypatch, broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["view", "runs/x"])


def test_the_module_is_a_program():
    done = subprocess.run([sys.executable, "-m", "clearhead", "trian"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean" in done.stderr
