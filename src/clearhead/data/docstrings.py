"""The default text: the documentation that is installed wherever clearhead runs.

Docstrings of at least 200 characters, of the standard library and of a fixed list of the packages clearhead depends
on, found by parsing the sources with `ast`; nothing is imported. Packages take turns in a fixed shuffled order, so any
beginning of the text is varied; whoever reads may stop when there is enough, and nothing further is parsed.

Near-duplicates are left out: a docstring of which more than a fifth of the 12-word runs were seen before in its split.
The split is by package: the held-out packages share less than 2 % of their 12-word runs with the training packages
(tests/data/test_docstrings.py measures it).

The text is a function of the installed versions: `fingerprint` names them. A listed package that is not installed is
left out, and the fingerprint says so.
"""

import ast
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from clearhead.data.document import Document, Split, stable_hash, take_turns
from clearhead.errors import ClearheadError

STANDARD_LIBRARY = "python"
# distribution names; every one is required by clearhead itself or by torch or datasets, never by a development tool
PACKAGES: dict[Split, tuple[str, ...]] = {
    "train": (
        STANDARD_LIBRARY,
        "torch",
        "transformers",
        "numpy",
        "pandas",
        "sympy",
        "huggingface_hub",
        "accelerate",
        "pyarrow",
        "fsspec",
        "narwhals",
        "duckdb",
        "tyro",
    ),
    "held_out": ("networkx", "mpmath", "datasets", "jinja2"),
}
MIN_CHARACTERS = 200
RUN_WORDS = 12
MAX_SEEN_SHARE = 0.2
ORDER = "clearhead default text 1"  # seeds the order of packages and files; raise the number to change the text
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib", "lib2to3", "__pycache__"}

WORD = re.compile(r"\w+")


def documents(split: Split) -> Iterator[Document]:
    """The docstrings of one split in their fixed order, without near-duplicates.

    Raises `ClearheadError` when none of the split's packages has its sources on this machine.
    """
    roots = [(package, root) for package in _shuffled(PACKAGES[split]) if (root := _sources(package)) is not None]
    if not roots:
        raise ClearheadError(
            f"none of the packages of the default text ({', '.join(PACKAGES[split])}) is installed with its sources; "
            f"name a folder, a file or a dataset with --text"
        )
    return _without_near_duplicates(take_turns(_package_documents(*root) for root in roots))


def fingerprint(split: Split) -> str:
    """What the text of a split depends on: its rules' version, and the packages' versions."""
    found = [f"{package} {_version(package)}" for package in PACKAGES[split]]
    return f"{ORDER}: {', '.join(found)}"


def word_runs(text: str) -> list[int]:
    """Hashes of the 12-word runs of `text`, words in lower case; comparable within one process only."""
    words = WORD.findall(text.lower())
    return [hash(tuple(words[i : i + RUN_WORDS])) for i in range(len(words) - RUN_WORDS + 1)]


def _without_near_duplicates(stream: Iterator[Document]) -> Iterator[Document]:
    seen: set[int] = set()
    for document in stream:
        runs = word_runs(document.text)
        if runs and sum(run in seen for run in runs) <= MAX_SEEN_SHARE * len(runs):
            seen.update(runs)
            yield document


def _package_documents(package: str, root: Path) -> Iterator[Document]:
    paths = sorted(path.relative_to(root).as_posix() for path in _python_files(root))
    for path in _shuffled(paths):
        module = f"{root.name}/{path}" if package != STANDARD_LIBRARY else path
        for name, text in _docstrings(root / path):
            yield Document(f"{module}:{name}" if name else module, text)


def _python_files(root: Path) -> Iterator[Path]:
    for entry in root.iterdir():
        if entry.is_dir():
            if entry.name not in LEFT_OUT:
                yield from _python_files(entry)
        elif entry.suffix == ".py" and not entry.name.startswith("test_"):
            yield entry


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        with warnings.catch_warnings():
            # an invalid escape in someone else's source is not our caller's concern
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # packages ship templates and sources for other Python versions; they are not text of this one
        return
    yield from _docstrings_in(tree, "")


def _docstrings_in(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str):
    text = ast.get_docstring(node)
    if text is not None and len(text) >= MIN_CHARACTERS:
        yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_in(child, f"{name}.{child.name}" if name else child.name)


def _sources(package: str) -> Path | None:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_path("stdlib"))
    try:
        root = metadata.distribution(package).locate_file(package)
    except metadata.PackageNotFoundError:
        return None
    root = Path(str(root))
    return root if root.is_dir() else None


def _version(package: str) -> str:
    if package == STANDARD_LIBRARY:
        return ".".join(map(str, sys.version_info[:3]))
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _shuffled(names: tuple[str, ...] | list[str]) -> list[str]:
    return sorted(names, key=lambda name: stable_hash(f"{ORDER}/{name}"))
