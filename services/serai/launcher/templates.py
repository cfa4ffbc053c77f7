"""Batch scripts: `agent.sbatch`, with what a site file and a command line say written before it. Pure.

There is one text that runs an agent in a job, and people who submit by hand use it as it is. A script made here is
that text below the options and settings that they would give it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import PurePosixPath

from serai.launcher.site import STOP_S, Exclude, JobPlan, RuntimeKind, Site
from serai.runtime.fields import BadInput
from serai.runtime.slurm_time import duration_text

_OPTION = re.compile(r"#SBATCH\s+(--[a-z-]+)(?:=(.*))?")
_VARIABLE = re.compile(r"(\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})")
_PASSED_ON = (
    "CUDA_VISIBLE_DEVICES",
    "TMPDIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "CUDA_CACHE_PATH",
)
"""Variables that containers which begin with an empty environment get."""
POOL = "pool"
"""In the place of an engine's program: a pool agent, which has none."""
_CONTAINERS = (RuntimeKind.APPTAINER, RuntimeKind.ENROOT, RuntimeKind.PYXIS, RuntimeKind.PODMAN)

# `module` is a function of login shells; batch scripts have it only where it is exported.
_MODULES = """\
if ! command -v module >/dev/null; then
    for file in /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh; do
        [[ -r $file ]] && . "$file"
    done
fi
module load {names} || {{ echo "agent.sbatch: module load failed on $HOSTNAME" >&2; exit 2; }}"""


def script(site: Site, plan: JobPlan, *, name: str = "", excluded: Sequence[Exclude] = (), array: int = 0) -> str:
    """The whole batch script. `name`: of the job; empty when it is given to sbatch with the script, as the time limit
    may be. `array`: so many equal jobs in one array."""
    template = files("serai.launcher").joinpath("agent.sbatch").read_text(encoding="utf-8")
    usual, body = _parted(template)
    options = usual | _options(site, plan, name, excluded, array)
    lines = [
        "#!/bin/bash",
        f"# Written by `serai submit`: model {_comment(plan.model)} at site {_comment(site.name)}.",
        *[_option(option, value) for option, value in options.items() if value is not None],
        *[f"#SBATCH {_quoted_option(word)}" for word in plan.profile.sbatch],
        "",
        *_settings(site, plan),
        "",
        "# ---- agent.sbatch ----",
    ]
    return "\n".join(lines) + "\n" + body


def _parted(template: str) -> tuple[dict[str, str | None], str]:
    """The options that the text has of its own, and the rest of it."""
    options: dict[str, str | None] = {}
    rest: list[str] = []
    for line in template.splitlines()[1:]:
        if found := _OPTION.fullmatch(line):
            options[found[1]] = found[2] or ""
        elif not line.startswith("##SBATCH"):
            rest.append(line)
    return options, "\n".join(rest) + "\n"


def _options(site: Site, plan: JobPlan, name: str, excluded: Sequence[Exclude], array: int) -> dict[str, str | None]:
    """Options of sbatch, which replace those of the text; None = without it, empty = without a value."""
    profile = plan.profile
    output = "serai-agent-%A_%a.out" if array else "serai-agent-%j.out"
    given = {
        "--job-name": name,
        "--output": f"{site.output.rstrip('/')}/{output}" if site.output else output,
        "--nodes": str(plan.nodes),
        "--time": duration_text(plan.time_s),
        "--time-min": duration_text(profile.time_least_s) if profile.time_least_s else "",
        "--signal": f"B:USR1@{plan.drain_s + STOP_S:.0f}",
        "--gres": plan.gres,
        "--cpus-per-task": "" if profile.cpus is None else str(profile.cpus),
        "--mem": profile.memory,
        "--partition": plan.partition,
        "--account": profile.account,
        "--qos": profile.qos,
        "--constraint": plan.constraint,
        "--reservation": profile.reservation,
        "--exclude": ",".join(dict.fromkeys(one.node for one in excluded)),
        "--array": f"1-{array}" if array else "",
    }
    options: dict[str, str | None] = {option: value for option, value in given.items() if value}
    if plan.nodes > 1:
        options |= {"--ntasks": None, "--ntasks-per-node": "1"}
    if profile.requeue is False:
        options |= {"--requeue": None, "--no-requeue": ""}
    return options


def _option(option: str, value: str | None) -> str:
    return f"#SBATCH {option}" if not value else f"#SBATCH {_quoted_option(f'{option}={value}')}"


def _quoted_option(word: str) -> str:
    """sbatch reads its lines with quotes, and `#` begins a comment there."""
    name, equals, value = word.partition("=")
    if not re.search(r"[\s#\"'\\]", value):
        return word
    if '"' in value:
        raise BadInput(name, f"is {value!r}", "leave out the quotation mark")
    return f'{name}{equals}"{value}"'


def _settings(site: Site, plan: JobPlan) -> list[str]:
    """Lines of bash: modules, variables, and the engine's command."""
    runtime, nats = plan.runtime, site.nats
    variables = {
        "SERAI_MODEL": plan.model,
        "SERAI_SITE": site.name,
        "SERAI_PROVIDER": site.provider,
        "SERAI_NATS_URL": nats.url,
        "SERAI_NATS_NKEY_FILE": nats.nkey_file,
        "SERAI_NATS_CREDS_FILE": nats.creds_file,
        "SSL_CERT_FILE": nats.ca_file,
        "SERAI_EXECUTABLE": site.executable,
        "SERAI_DRAIN_S": f"{plan.drain_s:g}",
        "SERAI_ENGINE": plan.profile.engine_kind or (_kind(plan.profile.engine) if _wrapped(plan) else ""),
        **plan.profile.environment,
    }
    lines = []
    if runtime.modules:
        lines.append(_MODULES.format(names=" ".join(expanded(name) for name in runtime.modules)))
    lines += ["set -u # A variable of this block that is not set on the node is told."]
    lines += [f"export {name}={expanded(value)}" for name, value in variables.items() if value]
    scratch = expanded(site.scratch) if site.scratch else "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}"
    lines.append(f"export SERAI_SCRATCH={scratch}")
    if plan.profile.cpus is not None:
        lines.append(f"export SRUN_CPUS_PER_TASK={plan.profile.cpus}")
    if runtime.kind is RuntimeKind.VENV:
        lines.append(f"export PATH={expanded(runtime.path.rstrip('/') + '/bin')}:$PATH")
    lines.append("set -- " + " ".join(expanded(word) for word in engine_words(plan)))
    return lines


def expanded(text: str) -> str:
    """`text` as one word of bash, in which `~/` at its beginning and `$NAME` are put in on the node, and nothing else
    is."""
    home = ""
    if text == "~" or text.startswith("~/"):
        home, text = '"$HOME"', text[1:]
    parts = _VARIABLE.split(text)
    words = [f'"{part}"' if number % 2 else shlex.quote(part) for number, part in enumerate(parts) if part]
    return home + "".join(words) or "''"


# -- the engine's command -------------------------------------------------------------------------------------------


def engine_words(plan: JobPlan) -> list[str]:
    """The command that the agent starts: the engine's, behind that of a container's program."""
    runtime, engine, gpus = plan.runtime, plan.profile.engine, bool(plan.gres)
    if engine[0] == POOL and runtime.kind in _CONTAINERS:
        raise BadInput(
            "engine",
            f"`{POOL}` is an agent, and a runtime of kind `{runtime.kind}` is for engines",
            "take a runtime of kind venv, and name containers in the file of --pool-templates",
        )
    mounts = (*runtime.mounts, "$SERAI_SCRATCH")
    passed_on = _repeated("--env", (*_PASSED_ON, *plan.profile.environment))
    match runtime.kind:
        case RuntimeKind.APPTAINER:
            words = [runtime.command or "apptainer", "exec"]
            words += ["--nv"] if gpus and "--rocm" not in runtime.options else []
            return [*words, *_repeated("--bind", mounts), *runtime.options, runtime.image, *engine]
        case RuntimeKind.ENROOT:
            words = [runtime.command or "enroot", "start", *_repeated("--mount", map(_pair, mounts)), *passed_on]
            return [*words, *runtime.options, runtime.image, *engine]
        case RuntimeKind.PODMAN:
            words = [runtime.command or "podman", "run", "--rm", "--init", "--network=host", "--ipc=host"]
            words += ["--device=nvidia.com/gpu=all"] if gpus and not _has_gpus(runtime.options) else []
            words += [*_repeated("--volume", map(_pair, mounts)), *passed_on, *runtime.options]
            # Images of engines have an entry point of their own.
            return [*words, f"--entrypoint={engine[0]}", runtime.image, *engine[1:]]
        case RuntimeKind.PYXIS:
            pairs = ",".join(map(_pair, mounts))
            words = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none"]
            words += [f"--container-image={runtime.image}", f"--container-mounts={pairs}", "--no-container-entrypoint"]
            return [*words, *runtime.options, *engine]
        case _:
            return list(engine)


def _has_gpus(options: Sequence[str]) -> bool:
    return any(option.startswith(("--device", "--gpu")) for option in options)


def _repeated(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _pair(mount: str) -> str:
    """`/models` is seen as `/models`."""
    return mount if ":" in mount else f"{mount}:{mount}"


def _wrapped(plan: JobPlan) -> bool:
    """Whether the agent sees another program than the engine's."""
    return plan.runtime.kind in _CONTAINERS


def _kind(engine: Sequence[str]) -> str:
    """The engine's kind, which an agent cannot see behind a container's program; empty = let it ask the engine."""
    words = [PurePosixPath(engine[0]).name, *engine[1:4]]
    if words[0] == "vllm" or any(word.startswith("vllm.") for word in words):
        return "vllm"
    if words[0] == "sglang" or any(word.startswith("sglang.") for word in words):
        return "sglang"
    return "llamacpp" if words[0] == "llama-server" else ""


def _comment(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
