"""A small HTTP server for this machine alone: loopback, GET, and what one function answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedpop.errors import SettingsError

HERE = ("127.0.0.1", "localhost")
"""Names under which it may be asked: a page from elsewhere, whose name was made to point here, may not."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
WAIT_SECONDS = 10.0
"""How long a connection may say nothing."""


@dataclass(frozen=True)
class Served:
    """What a path shows."""

    kind: str
    body: bytes
    status: int = 200


@contextmanager
def serving(port: int, answer: Callable[[str], Served | None]) -> Iterator[str]:
    """Serve in a thread; gives the address. Port 0 is a free one. None is 404."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "fedpop", "", WAIT_SECONDS

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            found = answer(self.path.partition("?")[0]) if host in HERE else None
            found = found or Served("text/plain; charset=utf-8", b"there is nothing here\n", 404)
            self.send_response(found.status)
            headers = {"Content-Type": found.kind, "Content-Length": str(len(found.body))}
            headers |= {"Cache-Control": "no-store", "Content-Security-Policy": POLICY}
            headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(found.body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Who looks is not logged."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Whoever asked went away."""

    try:
        server = Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise SettingsError(
            f"port {port} of this machine cannot be had ({error.strerror}): name another one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
