"""An OpenAI-compatible server on this machine that behaves as a test wants."""

import contextlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """`plan`: what to do with each request in turn ("good" when it is over); `seen`: the bodies and headers received.

    good: right answers for units active on `the` and `of`; slow: no answer in time; an integer: that status; garbled:
    no JSON; cut: the connection ends in the middle; nonsense: an answer of no use; empty: null for an answer; moved:
    a redirection; soon: 429 with Retry-After.
    """

    def __init__(self):
        self.plan = []
        self.seen = []
        self.headers = []
        self.usage = True
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                owner.reply(self)

            def log_message(self, format, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reply(self, request):
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self._lock:
            self.seen.append(body)
            self.headers.append(dict(request.headers))
            action = self.plan.pop(0) if self.plan else "good"
        if action == "slow":
            time.sleep(0.4)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._send(request, body, action)

    def _send(self, request, body, action):
        headers = {"soon": {"Retry-After": "7"}, "moved": {"Location": "http://example.invalid/"}}.get(action, {})
        status = {"soon": 429, "moved": 307}.get(action, action if isinstance(action, int) else 200)
        content = {"good": answer_to(body), "nonsense": "I would rather not say.", "empty": None}.get(action)
        reply = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        if self.usage:
            reply["usage"] = {"prompt_tokens": 100, "completion_tokens": 10}
        raw = b"<html>busy</html>" if action == "garbled" else json.dumps(reply).encode()
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(raw)))
        request.end_headers()
        request.wfile.write(raw[: len(raw) // 2] if action == "cut" else raw)


def answer_to(body):
    """What a model says that knows the unit is active on `the` and `of`."""
    system, user = (message["content"] for message in body["messages"])
    texts = re.findall(r"^\d+\. \(from token \d+\)(.*)$", user, flags=re.M)
    if "JSON list" in system:
        wanted = r"« (the|of)»" if "marked as" in system else r" (the|of)\b"
        return f"Sure: {json.dumps([int(re.search(wanted, text) is not None) for text in texts])}"
    if "does not belong" in system:
        return str(next(i for i, text in enumerate(texts, 1) if not re.search(r"« (the|of)»", text)))
    return '"Active on the and of."\n'
