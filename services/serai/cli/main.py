"""`serai …`: finds the command, imports only what it needs, and runs it."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from serai.runtime.version import VERSION


@dataclass(frozen=True, slots=True)
class Command:
    """A command's module has `add_arguments(parser)` and `run(arguments) -> exit code`. One that is named `""` is meant
    when only flags follow: `serai registry` runs the service, `serai registry ls` is a tool."""

    module: str
    help: str


Tree = dict[str, "Command | Tree"]

COMMANDS: Tree = {
    "up": Command("serai.cli.up", "start the whole system on this machine, with a small real model"),
    "agent": Command("serai.worker_agent.__main__", "wrap an engine in this allocation and join"),
    "submit": Command("serai.cli.submit", "submit Slurm jobs that serve a model"),
    "jobs": Command("serai.cli.jobs", "list those jobs: why they wait, when they start, what their sessions do"),
    "ingress": Command("serai.ingress.__main__", "run the OpenAI-compatible gateway"),
    "registry": {
        "": Command("serai.registry.__main__", "run the registry of a site"),
        "ls": Command("serai.cli.registry_ls", "list the sessions that the registry knows"),
        "show": Command("serai.cli.registry_show", "show all that is known of one session"),
        "watch": Command("serai.cli.registry_watch", "print changes of the registry as they come"),
        "explain": Command("serai.cli.registry_explain", "say why a session gets no requests"),
        "quarantine": {
            "ls": Command("serai.cli.quarantine_ls", "list the hosts that should get no new jobs, and why"),
            "clear": Command("serai.cli.quarantine_clear", "say that a host is well again"),
        },
        "ended": Command("serai.cli.registry_ended", "tell the registry that an allocation is over"),
    },
    "launcher": {
        "": Command("serai.launcher.__main__", "keep a site's models served, Slurm job after Slurm job"),
        "explain": Command("serai.cli.launcher_explain", "say what the launcher does for each slot, and why"),
        "wake": Command("serai.cli.launcher_wake", "start a deployment again that was let go or stopped"),
    },
    "macro-scheduler": Command("serai.macro_scheduler.__main__", "decide when which instance prefills what (PaDG)"),
    "macro": {
        "explain": Command("serai.cli.macro_explain", "say what was decided on a request, or how the windows roll"),
    },
    "placer": Command("serai.placer.__main__", "decide which model runs where, and have it carried out"),
    "place": {
        "plan": Command("serai.cli.place_plan", "show the placer's last plan, or make a new one"),
        "diff": Command("serai.cli.place_diff", "show what that plan would change of what runs now"),
        "apply": Command("serai.cli.place_apply", "let a proposed plan be carried out"),
        "explain": Command("serai.cli.place_explain", "say what is thought of a model, and why"),
        "simulate": Command("serai.bench.place.simulate", "replay a trace through the placer: attainment, moves, GPUs"),
        "bench": {
            "opentela": Command("serai.bench.place.opentela", "the published experiment: ours, theirs, memP"),
            "scale": Command("serai.bench.place.scale", "142 models on 5,000 GPUs: first plan, gap"),
            "dynamic": Command("serai.bench.place.dynamic", "placement that moves against one that stays"),
        },
    },
    "ledger": Command("serai.ledger.__main__", "keep the usage records of a site in SQL"),
    "usage": Command("serai.cli.usage", "sum up what was used, by project, model, provider, day or key"),
    "health": Command("serai.cli.health", "say whether the registry answers and how many models serve"),
    "keys": {
        "add": Command("serai.cli.keys_add", "make an API key; it is shown once"),
        "list": Command("serai.cli.keys_list", "list API keys: whose they are, what they may do, until when"),
        "remove": Command("serai.cli.keys_remove", "remove an API key"),
    },
    "config": {
        "check": Command("serai.cli.config_check", "say whether an ingress would start with a configuration file"),
        "show": Command("serai.cli.config_show", "show the settings that an ingress would start with, and where from"),
    },
    "engine": {
        "llamacpp": Command("serai.worker_agent.engine.llamacpp_server", "serve a GGUF file with llama.cpp"),
        "emulate": Command("serai.engine_emulator.command", "serve an emulated model: an engine in time only"),
    },
    "profile": {
        "show": Command("serai.bench.profile.show", "what the cost model says of a model on a GPU"),
        "engine": Command("serai.bench.profile.engine", "measure a running engine and fit a profile to it"),
        "validate": Command("serai.bench.profile.validate", "judge the shipped profiles on data they never saw"),
        "fit": Command("serai.bench.profile.fit", "fit the shipped profiles to measured data"),
    },
    "simulate": {
        "run": Command("serai.bench.simulate.scenario_run", "compare systems on a workload in virtual time"),
        "validate": Command(
            "serai.bench.simulate.validate", "judge the simulator by logs, live engines and repetition"
        ),
        "faults": Command("serai.bench.simulate.faults", "the real services in virtual time under random faults"),
        "partition": Command("serai.bench.simulate.partition", "two sites whose link is cut and healed, many seeds"),
        "goodput": Command("serai.bench.simulate.goodput", "the PaDG paper's comparison: rates that each system holds"),
        "never-worse": Command("serai.bench.simulate.never_worse", "our policy beside ordinary serving, cell by cell"),
        "burst": Command("serai.bench.simulate.burst", "what burstiness costs each policy"),
        "staleness": Command("serai.bench.simulate.staleness", "what late and lost status costs each policy"),
        "ablation": Command("serai.bench.simulate.ablation", "what the parts of a policy are worth"),
        "scaling": Command("serai.bench.simulate.scaling", "goodput by the number of instances"),
        "traces": Command("serai.bench.simulate.traces", "recorded traffic: what is attained, with how many GPUs"),
        "failover": Command("serai.bench.simulate.failover", "macro-schedulers and instances fail, many seeds"),
        "fleet": Command("serai.bench.simulate.fleet", "ten thousand sessions and a hundred readers, with churn"),
    },
    "bench": {
        "overhead": Command("serai.bench.overhead", "latency added to the engine's own, per request rate"),
        "gateway": Command("serai.bench.gateway", "throughput beside the engine alone and other gateways"),
        "emulator": Command("serai.bench.emulator", "how punctual the emulated engine's tokens are"),
        "convergence": Command("serai.bench.convergence", "how soon every copy of the registry has a change"),
        "detection": Command("serai.bench.detection", "how soon nothing is routed to what has failed"),
        "failover": Command("serai.bench.failover", "what clients see while one of two engines keeps being killed"),
        "faults": Command("serai.bench.faults.command", "what clients see when engines, clients and bodies misbehave"),
        "admission": Command("serai.bench.admission", "what asking a macro-scheduler costs"),
        "windows": Command("serai.bench.windows", "when instances prefill and decode, measured and drawn"),
        "padg-live": Command("serai.bench.padg_live", "live attainment of targets against the simulator's"),
        "agent": Command("serai.bench.agent", "what one agent costs: latency, memory, processor time, streams"),
        "memory": Command("serai.bench.memory", "what an ingress keeps in memory: many streams, many requests"),
        "idle-traffic": Command("serai.bench.idle_traffic", "bytes a second on an agent's connection"),
    },
}


EXTRAS = {
    "ortools": "placer",
    "matplotlib": "simulator",
    "tqdm": "simulator",
    "psycopg": "postgres",
    "xllamacpp": "local",
}
"""Modules that not everybody has, by the extra that brings them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command; 2 for a command that does not exist."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        sys.unraisablehook = lambda _: None  # What was under way is thrown away, and its last words help nobody.
        return 130


def _main(words: list[str]) -> int:
    if words and words[0] in ("--version", "-V"):
        print(f"serai {VERSION}")
        return 0
    path: list[str] = []
    epilog: str | None = None
    node: Command | Tree = COMMANDS
    if _begins_with_scenario(words):
        words.insert(1, "run")
    while isinstance(node, dict):
        if "" in node and (not words or words[0].startswith("-")):
            others = ", ".join(f"`serai {' '.join([*path, name])}`" for name in node if name)
            node, epilog = node[""], f"Beside it: {others}."
            continue
        if not words or not words[0] or words[0] not in node:
            return _explain(path, node, words)
        path.append(words[0])
        node = node[words.pop(0)]
    return _run(path, node, epilog, words)


def _run(path: list[str], command: Command, epilog: str | None, words: list[str]) -> int:
    module: Any = importlib.import_module(command.module)
    parser = _Parser(prog=f"serai {' '.join(path)}", description=module.__doc__, epilog=epilog)
    module.add_arguments(parser)
    try:
        code = int(module.run(parser.parse_args(words)))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `… | head`: what is left to say goes nowhere, also at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sys.stderr.write(f"{parser.prog}: needs {error.name}; install it with: pip install 'serai[{extra}]'\n")
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"{parser.prog}: {error.filename}: {error.strerror}\n")
        return 1


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the words in one line, instead of a page of all that may be said."""

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        for word in message.removeprefix("unrecognized arguments: ").split()[:1]:
            flags = [flag for action in self._actions for flag in action.option_strings]
            if near := difflib.get_close_matches(word.partition("=")[0], flags, 1):
                text += f"; did you mean {near[0]}?" if word.startswith("--") and word not in flags else ""
        self.exit(2, f"{self.prog}: {text} (`{self.prog} --help` tells more)\n")


def _begins_with_scenario(words: list[str]) -> bool:
    """`serai simulate FILE.yaml` is short for `serai simulate run FILE.yaml`; flags may come first."""
    files = [word for word in words[1:] if word.endswith((".yaml", ".yml"))]
    return words[:1] == ["simulate"] and bool(files) and (words[1] == files[0] or words[1].startswith("-"))


def _explain(path: list[str], node: Tree, words: list[str]) -> int:
    wrong = words and not words[0].startswith("-")
    out = sys.stderr if wrong else sys.stdout
    if wrong:
        print(f"serai: there is no command `{' '.join([*path, words[0]])}`\n", file=out)
    print(f"usage: serai {' '.join([*path, ''])}COMMAND …   (each has --help)\n", file=out)
    for name, command in node.items():
        shown = command.help if isinstance(command, Command) else _names(command)
        print(f"  {name:<10} {shown}", file=out)
    return 2 if wrong else 0


def _names(group: Tree) -> str:
    own = group.get("")
    return ", ".join([*([own.help] if isinstance(own, Command) else []), *[name for name in group if name]])


if __name__ == "__main__":
    raise SystemExit(main())
