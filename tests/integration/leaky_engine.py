"""An engine that never notices that a client has left: it goes on, and says so in its metrics (H41). With
`--slow-metrics` it has no time for anything but tokens (H37)."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RUNNING: set[int] = set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/metrics":
            if "--slow-metrics" in sys.argv and RUNNING:
                time.sleep(30)
            self._answer(f"vllm:num_requests_running {len(RUNNING)}\nvllm:generation_tokens_total 5\n".encode())
        elif self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": "m"}]}).encode())
        else:
            self._answer(b"{}", 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
        if not body.get("stream"):
            self._answer(json.dumps({"choices": [{"text": "x"}]}).encode(), 200 if body else 400)
            return
        RUNNING.add(threading.get_ident())
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        event = {"choices": [{"index": 0, "delta": {"content": " x"}, "finish_reason": None}]}
        while True:
            try:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            except OSError:
                pass  # As if nothing had happened.
            time.sleep(0.05)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
