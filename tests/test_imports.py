"""The shape of the code: what is loaded when, which layer imports which, and what no file may contain."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead
from clearhead.config import VERBS

SOURCE = Path(clearhead.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = {"torch", "transformers", "numpy", "datasets", "duckdb", "pyarrow", "plotly"}


def loaded_by(code):
    code += "\nimport json, sys, time\nprint(json.dumps([list(sys.modules), time.process_time()]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, seconds = json.loads(done.stdout.splitlines()[-1])
    return {name.partition(".")[0] for name in modules}, seconds


@pytest.mark.parametrize(
    "code",
    [
        "import clearhead; dir(clearhead)",
        "import clearhead.cli; clearhead.cli.main(['--help'])",
        "import clearhead.cli\ntry: clearhead.cli.main(['train', 'lorsa', '--help'])\nexcept SystemExit: pass",
        "import clearhead.config, clearhead.configfile, clearhead.runs, clearhead.hub, clearhead.errors",
    ],
)
def test_no_heavy_library_is_loaded_before_it_is_needed(code):
    modules, _ = loaded_by(code)
    assert not modules & HEAVY


def test_help_is_quick():
    _, bare = loaded_by("pass")
    seconds = min(loaded_by("import clearhead.cli; clearhead.cli.main(['--help'])")[1] for _ in range(3))
    assert seconds - bare < 0.5


def test_lazy_names_are_the_classes_themselves():
    for name in clearhead.__all__:
        assert name in dir(clearhead)
        if name != "__version__":
            assert getattr(clearhead, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Modle'"):
        clearhead.Modle  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_every_verb_has_its_module_with_a_plan_and_a_run():
    for verb in VERBS:
        tree = ast.parse((SOURCE / "commands" / f"{verb.replace(' ', '_')}.py").read_text())
        assert {"plan", "run"} <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_layer_imports_upwards():
    root = SOURCE.parents[1]
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_is_short_and_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "the file opens with no docstring"


FORBIDDEN = {
    "pickle": r"\bpickle\b.*\(|import pickle|(?<!safetensors\.)torch\.(load|save)\(|weights_only=False",
    "remote code": r"trust_remote_code\s*=\s*True",
    "print": r"(?<![\w.])print\(",
    "broad except": r"except\s*:|except\s+(Base)?Exception\b|suppress\((Base)?Exception\)",
    "unfinished": r"\bTODO\b|\bFIXME\b|\bXXX\b|\bNotImplementedError",
    "path of one machine": r"[\"'\s(](/work|/tmp|/root|/home)/",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what):
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(FORBIDDEN[what], line)
    ]
    assert not found


def test_names_say_what_things_are():
    vague = re.compile(r"^(utils?|helpers?|common|misc|base_.*|.*_utils?)$")
    assert not [path for path in FILES if vague.match(path.stem) or vague.match(path.parent.name)]
