"""Build the C kernels once into the user's cache and load them.

The file name carries a hash of the sources, the compiler's version, its options and the processor, so a new version of
any of them builds anew, and two processes that build at the same time replace each other's equal files.
Not here: the check of the result (check.py) and the choice to use it (dispatch.py).
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from clearhead.hub import cache_dir
from clearhead.runs import written_aside

SOURCES = ("attention.c", "gated.c", "sparse.c")
HEADERS = ("transpose.h", "vector.h")
OPTIONS = ("-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-std=gnu11")


class BuildError(Exception):
    """Why the kernels could not be built or loaded; the caller turns it into a notice or an error."""


def load_library() -> ctypes.CDLL:
    """The compiled kernels, built if this machine has not built them yet. Raises `BuildError`."""
    compiler = _compiler()
    folder = Path(__file__).parent
    path = cache_dir() / "kernels" / f"clearhead-{_key(folder, compiler)}.so"
    if not path.exists():
        _build(folder, compiler, path)
    return _load(path)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the kernels do not load: {error}") from error


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), "gcc", "clang", "cc"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("there is no C compiler: neither $CC nor gcc, clang or cc is installed")


def _key(folder: Path, compiler: str) -> str:
    parts = [(folder / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(b"\0".join([*parts, version, " ".join(OPTIONS).encode(), _processor()])).hexdigest()[:16]


def _processor() -> bytes:
    """What -march=native depends on: the model and its instruction sets."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}".encode()
    lines = cpuinfo.read_text().splitlines()
    named = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(named)})).encode()


def _build(folder: Path, compiler: str, path: Path) -> None:
    """Compile with threads, or without them where that does not compile or load.

    The library is not linked to OpenMP: torch has loaded one for all, and a second would keep a second set of threads
    spinning. A compiler whose OpenMP is another than torch's therefore gives kernels of one thread.
    """
    problems = []
    for threads in (["-fopenmp"], []):
        try:
            with written_aside(path) as aside:
                _compile(compiler, folder, threads, aside)
                _load(aside)
            return
        except BuildError as error:
            problems.append(str(error))
    raise BuildError("; ".join(problems))


def _compile(compiler: str, folder: Path, threads: list[str], target: Path) -> None:
    objects = [target.with_suffix(f".{name}.o") for name in SOURCES]
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    try:
        for source, part in zip(SOURCES, objects, strict=True):
            _run(compiler, *OPTIONS, *threads, "-c", str(folder / source), "-o", str(part))
        _run(compiler, "-shared", *undefined, *map(str, objects), "-o", str(target))
    finally:
        for part in objects:
            part.unlink(missing_ok=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-500:]}")
