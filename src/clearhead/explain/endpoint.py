"""A language model behind an OpenAI-compatible HTTP endpoint: one POST of JSON to `<url>/chat/completions` per request.

Answers come from the file of answers where it has them. A request that fails for a passing reason (no connection, time
out, 408, 429, 5xx, a body that is no JSON) is repeated up to `TRIES` times, after 1, 2, 4, ... seconds or what
Retry-After asks for, at most `LONGEST_WAIT`. An answer that makes no sense is asked for again with a reminder. When
all that fails the answer is None and the run goes on; after `IN_A_ROW` failed requests without any answer between them
it stops. A refusal that repeating does not change (401, 403, 404, a redirection) is an error.

Sent are the model's name, two messages, temperature 0 and max_tokens. Only the standard library is used.
"""

import email.utils
import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from clearhead.errors import ClearheadError
from clearhead.explain.answers import Answer, Answers, Spending, Stopped, key_of

KEYS = ("CLEARHEAD_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the key, the first one set counts."""
TRIES = 4
ASKED = 2
"""Times a question is put when the answer makes no sense."""
LONGEST_WAIT = 60.0
IN_A_ROW = 8
LARGEST_BODY = 1 << 20
_PASSING = (408, 409, 425, 429)

T = TypeVar("T")


class Prompt(NamedTuple):
    """What is asked: instructions, the matter, and how many tokens an answer may have."""

    system: str
    user: str
    max_tokens: int

    @property
    def n_bytes(self) -> int:
        """Bytes of both messages."""
        return len(self.system.encode()) + len(self.user.encode())


class _Failed(Exception):
    """One try failed for a reason that may pass; `wait` is what the server asked for."""

    def __init__(self, reason: str, wait: float | None = None, *, charged: bool = False):
        super().__init__(reason)
        self.wait, self.charged = wait, charged


class _Refused(Exception):
    """The server refuses this request, and would again."""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """A redirected request would take the key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Endpoint:
    """One model at one endpoint; `ask` may be called from several threads.

    sending: without it nothing is sent and only the costs are counted (`spending`), which is a dry run.
    Raises `ClearheadError` for an address that is none.
    """

    def __init__(
        self,
        url: str,
        model: str,
        answers: Answers,
        spending: Spending,
        *,
        timeout: float = 60.0,
        sending: bool = True,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.url, self.name = address(url), model
        self.answers, self.spending, self.timeout, self.sending = answers, spending, timeout, sending
        self._sleep = sleep
        self._key = next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
        self._opener = urllib.request.build_opener(_NoRedirection())
        self._lock = threading.Lock()
        self._failures = 0
        self._last = ""

    def ask(self, prompt: Prompt, read: Callable[[str], T | None]) -> T | None:
        """What `read` makes of the answer; it returns None for one that makes no sense.

        None also when no answer could be had. Raises `Stopped` at a limit or when the endpoint seems to be down,
        `ClearheadError` when it refuses the key, the model or the address.
        """
        reminder = last = ""
        for _ in range(ASKED):
            asked = prompt._replace(user=prompt.user + reminder)
            answer = self._answer(asked)
            if answer is None:
                return None
            found = read(answer.text)
            if found is not None:
                return found
            last = answer.text
            reminder = "\n\nAn earlier answer could not be read. Keep exactly to the form asked for."
        self.spending.count_failed(f"{ASKED} answers could not be read, the last began {last[:60]!r}")
        return None

    def _answer(self, prompt: Prompt) -> Answer | None:
        messages = [{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.user}]
        body = {"model": self.name, "messages": messages, "temperature": 0, "max_tokens": prompt.max_tokens}
        key = key_of({"endpoint": self.url, **body})
        held = self.answers.get(key)
        if held is not None:
            self.spending.count_cached()
            return held
        expected = prompt.n_bytes / self.answers.bytes_per_token, float(prompt.max_tokens)
        if not self.sending:
            with self.spending.request(*expected) as settle:
                settle(*expected)
            return None
        reason = "it was not asked"
        for tried in range(TRIES):
            with self.spending.request(*expected) as settle:
                try:
                    answer = self._post(body)
                except _Refused as refusal:
                    self._note_failure(str(refusal))
                    return None
                except _Failed as failure:
                    if failure.charged:
                        settle(*expected)
                    reason, pause = str(failure), failure.wait
                else:
                    taken = answer.prompt_tokens, answer.completion_tokens
                    settle(
                        *(known if known is not None else guess for known, guess in zip(taken, expected, strict=True))
                    )
                    self.answers.put(key, answer, prompt.n_bytes)
                    with self._lock:
                        self._failures = 0
                    return answer
            if tried + 1 < TRIES:
                self._sleep(min(2.0**tried if pause is None else pause, LONGEST_WAIT))
        self._note_failure(reason)
        return None

    def _note_failure(self, reason: str) -> None:
        self.spending.count_failed(reason)
        with self._lock:
            self._failures += 1
            self._last = reason
            if self._failures >= IN_A_ROW:
                raise Stopped(f"{self.url} failed {self._failures} times in a row, the last time: {reason}")

    def _post(self, body: dict[str, Any]) -> Answer:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "clearhead"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                raw = response.read(LARGEST_BODY)
        except urllib.error.HTTPError as error:
            raise self._explain(error) from error
        except TimeoutError as error:
            raise _Failed(f"no answer in {self.timeout:g} s", charged=True) from error
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
            if isinstance(error, urllib.error.URLError) and isinstance(error.reason, TimeoutError):
                raise _Failed(f"no answer in {self.timeout:g} s", charged=True) from error
            raise _Failed(f"no connection ({error})") from error
        return read_body(raw)

    def _explain(self, error: urllib.error.HTTPError) -> Exception:
        with error:
            try:
                said = error.read(2000).decode(errors="replace").strip()
            except (OSError, http.client.HTTPException):
                said = ""
        what = f"HTTP {error.code}" + (f": {' '.join(said.split())[:200]}" if said else "")
        if error.code in (401, 403):
            kept = "was refused" if self._key else "is missing"
            return ClearheadError(f"{self.url}: the key {kept} ({what}); set the environment variable {KEYS[0]}")
        if error.code == 404:
            return ClearheadError(f"{self.url} does not know this address or the model {self.name!r} ({what})")
        if 300 <= error.code < 400:
            to = error.headers.get("Location", "another address")
            return ClearheadError(
                f"{self.url} sends on to {to}; give that address, the key goes nowhere else by itself"
            )
        if error.code in _PASSING or error.code >= 500:
            return _Failed(what, _seconds(error.headers.get("Retry-After")))
        return _Refused(what)


def address(url: str) -> str:
    """The address to post to; raises `ClearheadError` for what is no http address."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address between them, a port that is no number
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise ClearheadError(f"--endpoint {url} is no address; give one as https://api.example.org/v1")
    url = url.rstrip("/")
    return url if url.endswith("/chat/completions") else f"{url}/chat/completions"


def read_body(raw: bytes) -> Answer:
    """The answer in a response's body; what is none counts as a passing failure, for it was cut or garbled."""
    try:
        body = json.loads(raw)
        text = body["choices"][0]["message"]["content"]
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, IndexError, TypeError) as error:
        raise _Failed(f"the response cannot be read ({error!r})", charged=True) from error
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    known = [count if type(count) is int and count >= 0 else None for count in counts]
    # null where a model spent all its tokens before it came to an answer: nothing said
    text = text if isinstance(text, str) else ""
    return Answer(text.encode(errors="replace").decode(), known[0], known[1])  # no half surrogates: no file holds them


def _seconds(retry_after: str | None) -> float | None:
    """What Retry-After asks for, in seconds: a number, or a date to wait for."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
