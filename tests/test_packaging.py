import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import clearhead

ROOT = Path(clearhead.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel's names, built from a copy of what git would hold, without a network."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_every_source_file_and_every_data_file(wheel):
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "clearhead").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert expected <= wheel.keys()
    suffixes = {Path(name).suffix for name in expected}
    assert {".py", ".c", ".js", ".css"} <= suffixes


def test_wheel_holds_the_small_model_where_the_package_looks_for_it(wheel):
    kept = ROOT / "tests" / "assets" / "tiny-gpt2-2L"
    for path in kept.iterdir():
        assert wheel[f"clearhead/model/assets/tiny-gpt2-2L/{path.name}"] == path.read_bytes()


def test_wheel_holds_nothing_else(wheel):
    about = f"clearhead-{clearhead.__version__}.dist-info/"
    assert not [name for name in wheel if not name.startswith(("clearhead/", about))]
    assert any(name.endswith("LICENSE") for name in wheel)


def test_version_is_said_once():
    assert PROJECT["version"] == clearhead.__version__
    assert f"version: {clearhead.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_every_requirement_is_pinned_within_its_range():
    pins = {canonical(name): version for name, version in PINS.items()}
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), text


def test_pins_name_no_local_path_and_no_local_build():
    for name, version in PINS.items():
        assert re.fullmatch(r"[\w.]+", version), f"{name}=={version}"


def test_this_environment_is_the_pinned_one():
    for name in ("torch", "transformers", "safetensors", "duckdb", "tyro"):
        assert metadata.version(name).partition("+")[0] == PINS[name]


def imported():
    """Top-level names of every import statement of the package."""
    names = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module).partition(".")[0])
    return names


def test_requirements_are_what_is_imported():
    declared = {Requirement(text).name.replace("-", "_") for text in PROJECT["dependencies"]}
    # llamascopium: the reference package, in an environment of its own; triton: the extra gpu
    assert declared == imported() - set(sys.stdlib_module_names) - {"clearhead", "llamascopium", "triton"}


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
