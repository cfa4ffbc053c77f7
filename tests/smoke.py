"""`make smoke`: `serai up` with the real model, one streamed answer by the very curl line that it prints, and down.

Then up again on the same state, to see that it is found. Closes with a line `N passed, N failed`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from serai.worker_agent.engine.process import free_port

UP_TIMEOUT_S = 120.0


class Failed(Exception):
    """What was expected and did not happen."""


def up(state: Path, port: int) -> tuple[subprocess.Popen[str], str]:
    """Starts `serai up`; the process and what it printed until it was up."""
    command = [sys.executable, "-m", "serai.cli.main", "up", "--port", str(port), "--state", str(state)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(UP_TIMEOUT_S, process.kill)
    watchdog.start()
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("Ctrl-C"):
            watchdog.cancel()
            return process, printed
    raise Failed(f"serai up ended before it was up:\n{printed}")


def ask(printed: str) -> tuple[str, float]:
    """Runs the printed curl line; the answer's text, and the seconds until its first content."""
    curl = next(line for line in printed.splitlines() if line.startswith("curl "))
    began_s = time.monotonic()
    process = subprocess.Popen(["bash", "-c", curl], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    text, first_s, done = "", 0.0, False
    for line in process.stdout:
        if not line.startswith("data: "):
            continue
        data = line[6:].strip()
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise Failed(f"the answer broke off: {chunk['error']['message']}")
        content = chunk["choices"][0]["delta"].get("content") or ""
        if content and not first_s:
            first_s = time.monotonic() - began_s
        text += content
    if process.wait() or not done or not text:
        raise Failed(f"the curl line did not stream a whole answer: exit {process.returncode}, {text!r}")
    return text, first_s


def down(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, and nothing is left running."""
    process.send_signal(signal.SIGINT)
    code = process.wait(40)
    if code != 0:
        raise Failed(f"serai up ended with exit code {code} after Ctrl-C")


def left_running(state: Path) -> list[str]:
    """Processes whose command line names our state folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(state) in line and int(folder.name) != os.getpid():
            found.append(line)
    return found


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="serai-smoke-") as folder:
        state, port = Path(folder) / "state", free_port()
        keys = []
        try:
            for name in ("first", "second"):
                began_s = time.monotonic()
                process, printed = up(state, port)
                try:
                    text, first_s = ask(printed)
                finally:
                    down(process)
                keys += re.findall(r"key +(sk-serai-\S+)", printed)
                print(f"{name} start: {time.monotonic() - began_s:.1f} s in all, first token after {first_s:.2f} s")
                print(f"  {' '.join(text.split())[:160]}")
            if len(set(keys)) != 1:
                raise Failed("the second start did not find the key of the first")
            if running := left_running(state):
                raise Failed(f"still running: {running}")
        except Failed as failure:
            print(failure)
            print("0 passed, 1 failed")
            return 1
    print("1 passed, 0 failed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
