"""The documentation says what is true of the code: commands parse, links lead somewhere, names exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

import clearhead
from clearhead import cli

ROOT = Path(clearhead.__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def commands():
    for page in PAGES:
        for block in blocks(page.read_text(), "sh"):
            for line in block.splitlines():
                if line.startswith(("clearhead ", "make ")):
                    yield pytest.param(shlex.split(line, comments=True), id=f"{page.name}: {line}")


@pytest.mark.parametrize("words", list(commands()))
def test_every_documented_command_exists(words, tmp_path, monkeypatch):
    if words[0] == "make":
        targets = re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert words[1] in targets
        return
    cls, rest = cli.find_verb(words[1:])
    assert cls is not None
    if "--from" in rest:  # the run that the page speaks of
        monkeypatch.chdir(tmp_path)
        place = Path(rest[rest.index("--from") + 1])
        place.parent.mkdir(parents=True)
        from clearhead.runs import write_json

        write_json(place, cls().to_dict())
    cli.parse(cls, rest)


def test_the_two_commands_of_the_readme():
    text = (ROOT / "README.md").read_text()
    assert "\nmake demo" in text and "\nmake test" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_pages_compiles_and_imports_what_exists(page):
    import ast
    import importlib

    for block in blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("clearhead"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert alias.name in dir(module)


def test_every_page_is_in_the_navigation():
    def paths(entry):
        if isinstance(entry, str):
            return {entry}
        return set().union(*(paths(part) for part in (entry.values() if isinstance(entry, dict) else entry)))

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert paths(nav) == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_sites_of_the_page_are_the_sites_of_the_grammar():
    from clearhead.model.sites import parse

    table = (ROOT / "docs/concepts/access.md").read_text().split("## Two paths")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    for name in re.findall(r"`([\w.]+)`", " ".join(rows)):
        assert str(parse(name.replace(".L", ".0"), 1)) == name.replace(".L", ".0")


def test_demo_weights_are_named_wherever_they_are_used():
    for page in ("README.md", "docs/tour.md", "docs/findings.md"):
        text = (ROOT / page).read_text()
        assert "SmolLM2-135M-Instruct" in text and "Q4_1" in text
