"""A Hugging Face hub on loopback for the tests: just enough of the protocol for one file at a time.

A model file is asked for with HEAD, then GET, at /OWNER/NAME/resolve/REVISION/PATH, perhaps from a byte on (Range). The
answer carries the commit (X-Repo-Commit), an ETag and the length; what is missing is told by X-Error-Code. Everything
else is 404.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

Files = Mapping[str, bytes]


@contextmanager
def hub(
    repositories: Mapping[str, Mapping[str, Files]],
    *,
    answered_commit: str | None = None,
    alter: Callable[[str, bytes], bytes] = lambda path, body: body,
    status: int | None = None,
    delay: float = 0.0,
    cut: float = 1.0,
    drops: int | None = None,
    stall: float = 0.0,
    lies: Mapping[str, str] | None = None,
    seen: list[Mapping[str, str]] | None = None,
) -> Iterator[str]:
    """Serve ``{"owner/name": {commit: {path: bytes}}}``; yields the address to put into HF_ENDPOINT.

    Faults: every answer names ``answered_commit``; ``alter`` changes the bytes but not the ETag; every answer has
    ``status``; every answer comes after ``delay`` seconds; of the announced bytes only the share ``cut`` is sent, then
    the connection ends (in the first ``drops`` downloads, or in all), after ``stall`` seconds; every answer has the
    headers ``lies``, whatever is true. The headers of all requests are added to ``seen``.
    """
    left = [1 << 30 if drops is None else drops]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, code: int, headers: Mapping[str, str], body: bytes = b"") -> None:
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            if start and code == 200:
                code, body = 206, body[start:]
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body)), **(lies or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                whole = cut == 1 or left[0] == 0
                self.wfile.write(body if whole else body[: int(cut * len(body))])
                left[0] -= not whole
                if not whole:
                    ended.wait(stall)
                self.close_connection = not whole

        def do_GET(self) -> None:
            time.sleep(delay)
            if seen is not None:
                seen.append({name.title(): value for name, value in self.headers.items()})
            if status is not None:
                return self.reply(status, {})
            parts = unquote(self.path.split("?")[0]).lstrip("/").split("/", 4)
            if len(parts) != 5 or parts[2] != "resolve":
                return self.reply(404, {})
            owner, name, _, commit, path = parts
            commits = repositories.get(f"{owner}/{name}")
            if commits is None:
                return self.reply(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            if commit not in commits:
                return self.reply(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"No {commit}"})
            if path not in commits[commit]:
                return self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": f"No {path}"})
            body = commits[commit][path]
            headers = {
                "X-Repo-Commit": answered_commit or commit,
                "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
            }
            self.reply(200, headers, alter(path, body))

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    ended = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # A client that gives up is what some tests ask for; its traceback would stand in that client's output.
    server.handle_error = lambda request, address: None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
