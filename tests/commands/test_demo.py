from pathlib import Path

import pytest

from clearhead.commands import demo
from clearhead.config import Demo
from clearhead.runs import write_json

NUMBERS = {
    "train lorsa": {"model": "smollm2", "layer": 12, "heads": 4608, "tokens": 160_000, "tokens_per_second": 1900.0},
    "evaluate": {"fvu": 0.2345, "l0": 63.9, "dead_share": 0.1, "tokens": 30_000, "ce_recovered": 0.97},
    "analyze": {"schema": 1},
}


@pytest.fixture
def work(monkeypatch, tmp_path):
    """The demo with steps that only note that they ran and leave a plausible output."""
    ran = []
    real = demo.steps

    def steps(config):
        def leave(step):
            def work(_):
                ran.append(step.config.verb)
                write_json(step.output, NUMBERS.get(step.config.verb, {}))

            return step._replace(work=work)

        return [leave(step) for step in real(config)]

    monkeypatch.setattr(demo, "steps", steps)
    monkeypatch.chdir(tmp_path)
    return ran


ALL = ["train lorsa", "evaluate", "analyze", "view"]


def test_a_second_demo_repeats_nothing_and_shows_the_same(work, capsys):
    demo.run(Demo())
    assert work == ALL
    first = capsys.readouterr().out
    demo.run(Demo())
    assert work == ALL
    assert capsys.readouterr().out.count("done before") == 4
    assert "SmolLM2-135M-Instruct dequantised from Q4_1 (not the hub's SmolLM2-135M)" in first


def test_the_table_the_page_and_three_commands(work, capsys):
    demo.run(Demo())
    lines = capsys.readouterr().out.splitlines()
    rows = dict(line.strip().split("  ", 1) for line in lines if line.startswith("  ") and "train lorsa" not in line)
    names = ["FVU", "L0", "dead heads", "CE recovered", "tokens/s", "peak memory", "wall time"]
    assert [name for name in rows] == names
    assert rows["FVU"].strip() == "0.234" or rows["FVU"].strip() == "0.235"
    assert rows["dead heads"].strip().startswith("10.0% on 30,000")
    (page,) = [line for line in lines if line.startswith("page: ")]
    assert Path(page.removeprefix("page: ")).is_file()
    after = lines[lines.index("next:") + 1 :]
    assert len(after) == 3 and all("train lorsa" in line for line in after)


def test_the_commands_it_proposes_parse(work, capsys):
    from clearhead import cli

    demo.run(Demo())
    write_json(Path("runs/demo/config.json"), demo.steps(Demo())[0].config.to_dict())
    lines = capsys.readouterr().out.splitlines()
    for line in lines[lines.index("next:") + 1 :]:
        words = line.split()[1:]
        cls, rest = cli.find_verb(words)
        assert cls is not None
        if "--help" not in rest:
            cli.parse(cls, rest)


def test_a_step_is_repeated_with_what_follows_it_when_its_settings_change(work):
    demo.run(Demo())
    work.clear()
    demo.run(Demo(measured_tokens=5000))
    assert work == ["evaluate", "analyze", "view"]


def test_a_step_is_repeated_when_its_output_is_gone(work):
    demo.run(Demo())
    work.clear()
    Path("runs/demo/atlas/atlas.json").unlink()
    demo.run(Demo())
    assert work == ["analyze", "view"]


def test_an_interrupted_demo_keeps_what_was_finished(work, monkeypatch):
    steps = demo.steps

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        demo, "steps", lambda config: [s._replace(work=stop) if i == 2 else s for i, s in enumerate(steps(config))]
    )
    with pytest.raises(KeyboardInterrupt):
        demo.run(Demo())
    monkeypatch.setattr(demo, "steps", steps)
    work.clear()
    demo.run(Demo())
    assert work == ["analyze", "view"]


def test_plan_says_what_is_done(work):
    assert demo.plan(Demo())["evaluate"] == "will write runs/demo/evaluation.json"
    demo.run(Demo())
    assert demo.plan(Demo())["evaluate"] == "done before"
