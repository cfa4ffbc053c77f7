"""An engine whose streams never end, as fast as they are read. GET /written says how much it has written."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DELTA = json.dumps({"choices": [{"index": 0, "delta": {"content": "caravan " * 100}, "finish_reason": None}]})
EVENT = f"data: {DELTA}\n\n".encode()
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
written = {"bytes": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        answers = {"/v1/models": {"data": [{"id": "m"}]}, "/health": {}, "/written": written}
        self._answer(200 if self.path in answers else 404, answers.get(self.path, {}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not asked.get("stream"):
            self._answer(200, {"choices": [{"index": 0, "text": "x", "message": {"content": "x"}}]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if asked["max_tokens"] < 1000:
            self.wfile.write(EVENT * 20 + LAST)
            return
        try:
            while True:
                self.wfile.write(EVENT * 8)
                written["bytes"] += 8 * len(EVENT)
        except OSError:
            pass  # Nobody wants more.

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
