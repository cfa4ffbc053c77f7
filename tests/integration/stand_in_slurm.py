"""A stand-in for Slurm's commands whose jobs are processes here and whose time limits are seconds.

`python stand_in_slurm.py FOLDER [env …] sbatch|squeue|scancel|scontrol …`. FOLDER/settings.json says what jobs wait and
live, and forces faults: {"wait_s", "limit_s", "warn_s", "squeue": "hang" | "empty" | "fail" | ""}. Each job is a file
and a runner process, which warns it, ends it at its limit, and writes down how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GRACE_S = 5.0
FIELDS = "JOBID|JOBID|USER|SUBMIT_TIME|STATE|PARTITION|TIME_LIMIT|TIME_LEFT|START_TIME|NODELIST|NAME|REASON"


def settings(folder: Path) -> dict[str, Any]:
    return {"wait_s": 0.5, "limit_s": 30.0, "warn_s": 8.0, "squeue": ""} | json.loads(
        (folder / "settings.json").read_text()
    )


def write(path: Path, found: dict[str, Any]) -> None:
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(found))
    fresh.replace(path)


def sbatch(folder: Path, words: list[str]) -> int:
    options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
    script = sys.stdin.read()
    if "--test-only" in options:
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        print(f"sbatch: Job 1 to start at {now} using 1 processors on nodes n1 in partition p", file=sys.stderr)
        return 0
    number = 100 + len(list(folder.glob("*.json")))
    (folder / f"{number}.sh").write_text(script)
    job = {"number": number, "name": options["--job-name"], "state": "PENDING", "submitted": int(time.time())}
    job |= {"limit_s": settings(folder)["limit_s"], "comment": options.get("--comment", "")}
    write(folder / f"{number}.json", job)
    log = (folder / f"{number}.out").open("wb")
    subprocess.Popen(
        [sys.executable, __file__, str(folder), "run", str(number)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    print(number)
    return 0


def squeue(folder: Path) -> int:
    fault = settings(folder)["squeue"]
    if fault == "hang":
        time.sleep(600)
    if fault == "fail":
        print("slurm_load_jobs error: Unable to contact slurm controller", file=sys.stderr)
        return 1
    print(f"SERAI|{FIELDS}")
    for path in sorted(folder.glob("*.json")) if fault != "empty" else []:
        if path.stem == "settings":
            continue
        job = json.loads(path.read_text())
        left_s = job["limit_s"] - (time.time() - job["started"]) if job.get("started") else job["limit_s"]
        facts = [job["number"], job["number"], "me", job["submitted"], job["state"], "p", clock(job["limit_s"])]
        facts += [clock(left_s), int(job.get("started", 0)) or "N/A", "n1", job["name"], "None"]
        print("|".join(["SERAI", *map(str, facts)]))
    return 0


def clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def scancel(folder: Path, words: list[str]) -> int:
    job = json.loads((folder / f"{words[-1]}.json").read_text())
    if "runner" in job:
        os.kill(job["runner"], signal.SIGTERM)
    return 0


def run(folder: Path, number: str) -> int:
    """One job's life."""
    path, own = folder / f"{number}.json", settings(folder)
    job = json.loads(path.read_text()) | {"runner": os.getpid()}
    cancelled = False

    def on_cancel(*_: object) -> None:
        nonlocal cancelled
        cancelled = True

    signal.signal(signal.SIGTERM, on_cancel)
    write(path, job)
    time.sleep(own["wait_s"])
    if cancelled:
        write(path, job | {"state": "CANCELLED"})
        return 0
    job |= {"state": "RUNNING", "started": time.time()}
    write(path, job)
    environment = os.environ | {"SLURM_JOB_ID": number, "SLURM_JOB_END_TIME": str(int(job["started"] + job["limit_s"]))}
    batch = subprocess.Popen(["bash", str(folder / f"{number}.sh")], env=environment, start_new_session=True)
    ends_at_s = job["started"] + job["limit_s"]
    warned = False
    state = ""
    while batch.poll() is None:
        now = time.time()
        if now >= ends_at_s - own["warn_s"] and not warned:
            warned = True
            batch.send_signal(signal.SIGUSR1)
        if now >= ends_at_s or cancelled:
            state = "CANCELLED" if cancelled else "TIMEOUT"
            os.killpg(batch.pid, signal.SIGTERM)
            try:
                batch.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(batch.pid, signal.SIGKILL)
                batch.wait()
            break
        time.sleep(0.1)
    write(
        path, job | {"state": state or ("COMPLETED" if batch.returncode == 0 else "FAILED"), "code": batch.returncode}
    )
    return 0


def main(folder: Path, words: list[str]) -> int:
    if words[0] == "env":
        words = [word for word in words[1:] if "=" not in word or word.startswith("-")]
    command, rest = words[0], words[1:]
    match command:
        case "sbatch":
            return sbatch(folder, rest)
        case "squeue":
            return squeue(folder)
        case "scancel":
            return scancel(folder, rest)
        case "run":
            return run(folder, rest[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
