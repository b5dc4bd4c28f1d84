"""Answers that were paid for once, and what they cost: a file of JSON lines, counters, and limits.

An answer is kept under the SHA-256 of everything that determines it: endpoint, model, messages, number of tokens. It
is on the disk before it is used, so an interrupted run asks nothing twice. A last line cut by a kill is dropped. API
keys are neither in the key nor in the file.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import CorruptFileError

BYTES_PER_TOKEN = 3.5
"""Of prompts such as ours, where no answered request says better."""


class Stopped(Exception):
    """The run must end here, cleanly; the text says why."""


class Answer(NamedTuple):
    """What was answered, and the tokens it took as the one who answered counted them (None where it did not)."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Answers:
    """The answers in one file, in order; safe to use from several threads."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._held: dict[str, Answer] = {}
        self._bytes = self._tokens = 0
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for number, line in enumerate(lines[:-1]):
            self._read(number, line)
        self._cut = bool(lines and lines[-1])

    def _read(self, number: int, line: bytes) -> None:
        try:
            entry = json.loads(line)
            tokens = entry["prompt_tokens"], entry["completion_tokens"]
            self._hold(entry["key"], Answer(entry["answer"], *tokens), entry["prompt_bytes"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise CorruptFileError(
                f"line {number + 1} of {self.path} is no answer ({error!r}); delete that line, or the file"
            ) from error

    def _hold(self, key: str, answer: Answer, prompt_bytes: int) -> None:
        self._held[key] = answer
        if answer.prompt_tokens is not None:
            self._bytes += prompt_bytes
            self._tokens += answer.prompt_tokens

    @property
    def bytes_per_token(self) -> float:
        """Bytes per prompt token: counted on the answers held, `BYTES_PER_TOKEN` where none says."""
        return self._bytes / self._tokens if self._tokens else BYTES_PER_TOKEN

    @property
    def counted(self) -> bool:
        """Whether `bytes_per_token` was counted."""
        return self._tokens > 0

    def get(self, key: str) -> Answer | None:
        """The answer under this key, or None."""
        with self._lock:
            return self._held.get(key)

    def put(self, key: str, answer: Answer, prompt_bytes: int) -> None:
        """Write an answer to the file and hold it."""
        entry = {
            "key": key,
            "answer": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "prompt_bytes": prompt_bytes,
        }
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._cut:  # the last line lacks its end: it goes, so that this one is whole
                whole = self.path.read_bytes()
                self.path.write_bytes(whole[: whole.rfind(b"\n") + 1])
                self._cut = False
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=True) + "\n")
            self._hold(key, answer, prompt_bytes)


def key_of(request: Mapping[str, Any]) -> str:
    """The key of a request: the hash of its canonical JSON."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


@dataclass
class Spending:
    """What a run asked and may ask. Prices are per million tokens; None for a limit or price not given."""

    price_in: float | None = None
    price_out: float | None = None
    max_requests: int | None = None
    max_cost: float | None = None
    requests: int = 0
    """Sent, each retry too."""
    cached: int = 0
    """Answers taken from the file."""
    failed: int = 0
    """Asked in vain, all retries included."""
    failure: str = ""
    """Why the last of these."""
    prompt_tokens: float = 0
    completion_tokens: float = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._reserved = 0.0

    @property
    def cost(self) -> float | None:
        """Spent so far; None without prices."""
        return self._price(self.prompt_tokens, self.completion_tokens)

    def _price(self, prompt: float, completion: float) -> float | None:
        if self.price_in is None or self.price_out is None:
            return None
        return (prompt * self.price_in + completion * self.price_out) / 1e6

    @contextlib.contextmanager
    def request(self, prompt_tokens: float, completion_tokens: float) -> Iterator[Callable[[float, float], None]]:
        """Around one request that may take so many tokens; yields a function to call with what it took.

        Raises `Stopped` when it could exceed a limit, counting what other threads have under way.
        """
        expected = self._price(prompt_tokens, completion_tokens) or 0.0
        with self._lock:
            if self.max_requests is not None and self.requests >= self.max_requests:
                raise Stopped(f"--max-requests {self.max_requests} are made")
            spent = (self.cost or 0.0) + self._reserved
            if self.max_cost is not None and spent + expected > self.max_cost:
                raise Stopped(f"{spent:.4f} are spent and the next request could exceed --max-cost {self.max_cost}")
            self.requests += 1
            self._reserved += expected
        try:
            yield self._settle
        finally:
            with self._lock:
                self._reserved -= expected

    def _settle(self, prompt_tokens: float, completion_tokens: float) -> None:
        with self._lock:
            self.prompt_tokens += prompt_tokens
            self.completion_tokens += completion_tokens

    def count_cached(self) -> None:
        """One more answer from the file."""
        with self._lock:
            self.cached += 1

    def count_failed(self, why: str) -> None:
        """One more asked in vain."""
        with self._lock:
            self.failed, self.failure = self.failed + 1, why
