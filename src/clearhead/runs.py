"""Run directories: what every result carries, how files reach the disk whole, and how long work shows its progress.

A run directory holds `config.json` (resolved), `env.json` (versions, commit, device, threads), `metrics.jsonl`,
checkpoints and `summary.json` (final numbers under stable keys). One process owns a directory at a time.
"""

import contextlib
import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError
from clearhead.hub import NO_ROOM

VERSIONED = ("clearhead", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "numpy")


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` only if the block succeeds.

    A killed process or a full disk therefore never leaves a half-written file under the real name.
    Raises `ClearheadError` when the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ClearheadError(
                f"no space left on the disk that holds {path.parent}; {path.name} was not written and what was "
                f"there before is unchanged. Free some space, then repeat the command."
            ) from error
        raise
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def progress(
    what: str, total: int, unit: str = "tokens", *, done: int = 0, every: float = 10.0, quiet: bool = False
) -> Iterator[Callable[[int], object]]:
    """Show work on stderr with its rate and time left; the block calls the yielded `advance(n)` as it proceeds.

    A terminal gets a bar; anything else (a log file, CI) gets a line at most every `every` seconds and one at the end.
    `done` is what an earlier process had finished and does not count towards the rate. `quiet` is for work inside work
    that shows its own.
    """
    if quiet:
        yield lambda _: None
        return
    if sys.stderr.isatty():
        with tqdm(total=total, desc=what, unit=f" {unit}", initial=done, unit_scale=True, dynamic_ncols=True) as bar:
            yield bar.update
        return
    start = shown = time.monotonic()
    count = done

    def advance(n: int) -> None:
        nonlocal count, shown
        count += n
        now = time.monotonic()
        if count >= total or now - shown >= every:
            shown = now
            rate = (count - done) / max(now - start, 1e-9)
            left = f"{(total - count) / rate:,.0f} s left" if count < total and rate else f"{now - start:,.1f} s"
            sys.stderr.write(f"{what}: {count:,} of {total:,} {unit}, {rate:,.0f}/s, {left}\n")
            sys.stderr.flush()

    yield advance


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all; raises `NonFiniteError` naming a key of NaN or infinity."""
    text = _json(path, value, indent=1)
    with written_aside(path) as aside:
        aside.write_text(text + "\n", encoding="utf-8")


def _json(path: Path, value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinity are none, and are refused before `path` is touched."""
    bad = next(_non_finite(value), None)
    if bad is not None:
        raise NonFiniteError(f"{bad[0]} is {bad[1]} and was not written to {path}")
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def _non_finite(value: Any, key: str = "the value") -> Iterator[tuple[str, float]]:
    """Key and value of every number that is not finite, as deep as it lies."""
    if isinstance(value, float) and not math.isfinite(value):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _non_finite(part, str(name) if key == "the value" else f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _non_finite(part, f"{key}[{index}]")


def read_json(path: Path) -> Any:
    """Read JSON; raises `CorruptFileError` naming the file and the place when it does not parse."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ClearheadError(f"there is no file {path}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path} is not valid JSON ({error}); restore it or delete it and run again") from error


def environment() -> dict[str, Any]:
    """Versions, commit, machine and threads of this process, as `env.json` stores them."""
    versions = {}
    for name in VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    env: dict[str, Any] = {
        "versions": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "commit": _commit(),
        "command": sys.argv,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        env["threads"] = torch.get_num_threads()
        env["cuda"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return env


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        out = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() if out.returncode == 0 else None


class RunDirectory:
    """A directory owned by one process: config, environment, metrics and summary.

    Use as a context manager; the lock is the operating system's, so it is released when the process dies.
    Raises `ClearheadError` when another live process owns the directory.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock: int | None = None

    def __enter__(self) -> "RunDirectory":
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = None
            raise ClearheadError(
                f"another process is writing to {self.path}; wait for it to end or choose another directory with --out"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_config(self, config: dict[str, Any]) -> None:
        """Record the resolved configuration and the environment."""
        write_json(self.path / "config.json", config)
        write_json(self.path / "env.json", environment())

    def log(self, **metrics: Any) -> None:
        """Append one line of metrics to `metrics.jsonl`; raises `NonFiniteError` naming one that is not finite."""
        path = self.path / "metrics.jsonl"
        line = _json(path, metrics)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def truncate_metrics(self, step: int) -> None:
        """Drop metric lines of steps after `step`, so a resumed run does not log a step twice."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            # a kill can cut the last line; whatever does not parse was never a complete record
            with contextlib.suppress(json.JSONDecodeError):
                if json.loads(line).get("step", 0) <= step:
                    kept.append(line)
        with written_aside(path) as aside:
            aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the final numbers of the run under stable keys."""
        write_json(self.path / "summary.json", summary)
