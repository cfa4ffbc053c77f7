"""What Slurm's commands answer, read strictly. Pure.

Login nodes print banners, wrappers print warnings, commands are cut off in the middle. So each line that is meant for
us begins with a word of its own, and an answer counts only when it is whole: it has its heading, and each of its lines
can be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from serai.launcher.jobs import ExpectedStart, JobId, JobState, ObservedJob, RefusalKind, Refused, Unknown
from serai.runtime.slurm_time import duration_s

_MARK = "SERAI"
SQUEUE_FORMAT = f"{_MARK}|%i|%A|%u|%V|%T|%P|%l|%L|%S|%N|%j|%r"
"""Names may hold anything, reasons spaces: they come last."""
_FIXED = 11
"""Fields before the name."""
FAR_S = 10 * 365 * 86_400.0
"""A start that is further away is Slurm's way to say never."""

_STATES = {
    "PENDING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "CONFIGURING": JobState.STARTING,
    "POWER_UP_NODE": JobState.STARTING,
    "RUNNING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "COMPLETING": JobState.COMPLETING,
    "SUSPENDED": JobState.SUSPENDED,
    "STOPPED": JobState.SUSPENDED,
    "COMPLETED": JobState.COMPLETED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMED_OUT,
    "DEADLINE": JobState.TIMED_OUT,
    "PREEMPTED": JobState.PREEMPTED,
    "NODE_FAIL": JobState.NODE_FAILED,
    "BOOT_FAIL": JobState.NODE_FAILED,
    "FAILED": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
}


def jobs_in(output: str, cluster: str = "") -> tuple[ObservedJob, ...] | Unknown:
    """The jobs of one answer of squeue to `SQUEUE_FORMAT`. Without its heading it is none: an empty answer is what a
    controller that starts anew, or a wrapper that fails, gives."""
    jobs: list[ObservedJob] = []
    heading = False
    if output and not output.endswith("\n"):
        return Unknown("squeue's answer is cut short")
    for line in output.splitlines():
        if not line.startswith(f"{_MARK}|"):
            continue
        fields = line.split("|", _FIXED)
        if fields[1:3] == ["JOBID", "JOBID"]:
            heading = True
        elif (job := _job(fields, cluster)) is None:
            return Unknown(f"squeue's answer has a line that is none: {last_words(line)}")
        else:
            jobs.append(job)
    if not heading:
        return Unknown(f"squeue answered without its heading: {last_words(output) or 'nothing'}")
    return tuple(jobs)


def _job(fields: list[str], cluster: str) -> ObservedJob | None:
    if len(fields) != _FIXED + 1 or "|" not in fields[-1] or not re.match(r"\d+", fields[1]) or not fields[2].isdigit():
        return None
    _, shown, number, user, submitted, word, partition, limit, left, start, nodes, rest = fields
    name, _, reason = rest.rpartition("|")
    # All parts of a heterogeneous job see the number of its first.
    leader = shown.partition("+")[0] if "+" in shown else number
    return ObservedJob(
        id=JobId(cluster, shown, moment_s(submitted) or 0, user),
        state=_STATES.get(word, JobState.UNKNOWN),
        word=word,
        number=leader,
        name=name,
        partition=partition,
        reason="" if reason in ("None", "(null)") else reason,
        nodes="" if nodes == "(null)" else nodes,
        time_limit_s=duration_s(_in_minutes(limit)),
        time_left_s=duration_s(_in_minutes(left)),
        starts_at_s=moment_s(start),
    )


def _in_minutes(text: str) -> str:
    """squeue never means minutes by a bare number."""
    return f"0:{text}" if text.isdigit() else text


def moment_s(text: str) -> int | None:
    """Seconds since 1970 of a moment as Slurm writes it: a count (`SLURM_TIME_FORMAT=%s`) or a local time. None for
    `N/A`, `Unknown`, `NONE` and the like."""
    if text.isdigit():
        return int(text) if len(text) <= 12 else None
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        return None


# -- sbatch ----------------------------------------------------------------------------------------------------------

_SUBMITTED = re.compile(r"(\d+)(?:;([\w.-]+))?")
_TEST_ONLY = re.compile(r"Job \d+ to start at (\S+)")


def submitted(code: int, output: str, errors: str, cluster: str = "") -> JobId | Refused | Unknown:
    """What `sbatch --parsable` says: a line with the number alone, or with the cluster behind it, among banners."""
    found = [match for line in output.splitlines() if (match := _SUBMITTED.fullmatch(line.strip()))]
    if code == 0 and found:
        return JobId(found[-1][2] or cluster, found[-1][1])
    if code == 0:
        return Unknown(f"sbatch did not tell the job's number: {last_words(output + errors) or 'it said nothing'}")
    if found:
        return Unknown(f"sbatch told a job's number and failed: {last_words(errors) or f'exit code {code}'}")
    return refusal(errors or output or f"exit code {code}")


def start_in(code: int, text: str, now_s: float) -> ExpectedStart | Refused | Unknown:
    """What `sbatch --test-only` says, at `now_s` seconds since 1970."""
    found = _TEST_ONLY.search(text)
    if found is None:
        return refusal(text) if code else Unknown(f"sbatch --test-only did not tell a start: {last_words(text)}")
    at_s = moment_s(found[1])
    if at_s is None or at_s - now_s > FAR_S:
        return Unknown(f"no start is in sight: {last_words(found[0])}")
    return ExpectedStart(max(0.0, at_s - now_s), last_words(text))


_RESOURCES = "compare GPUs, CPUs, memory and nodes with what the partition has: sinfo -o '%P %l %G %c %m %f'"
_REFUSALS: tuple[tuple[str, RefusalKind, str], ...] = (
    (
        r"env: .*No such file|command not found",
        RefusalKind.INVALID,
        "no Slurm commands on this machine: run this on a login node, or set `prefix` below `slurm` in the site file",
    ),
    (
        r"QOSMax|MaxSubmitJob|job submit limit|AssocMax|AssocGrp|QOSGrp|violates accounting/QOS policy|job limit",
        RefusalKind.QUOTA,
        "wait until some of your jobs have ended, or use another account or QOS (--account, --qos)",
    ),
    (
        r"Invalid account|account/partition combination|InvalidAccount|[Nn]o account|must specify an? account"
        r"|account .*(not|invalid)",
        RefusalKind.INVALID,
        "set `account` in the site file or give --account; yours are shown by: sacctmgr show assoc user=$USER "
        "format=account,partition,qos",
    ),
    (
        r"[Ii]nvalid partition|partition .*not (available|found)|Required partition",
        RefusalKind.INVALID,
        "no such partition (any more): sinfo lists them; change `partition` in the site file or give --partition",
    ),
    (r"[Ii]nvalid qos", RefusalKind.INVALID, "change `qos` in the site file or give --qos"),
    (
        r"time limit|--time specification|TimeLimit",
        RefusalKind.INVALID,
        "give a shorter --time; sinfo -o '%P %l' shows the limits of the partitions",
    ),
    (
        r"\(gres\)|generic resource|feature specification|node configuration is not available|node count"
        r"|[Mm]emory specification|CPU count|More processors",
        RefusalKind.INVALID,
        _RESOURCES,
    ),
    (
        r"Invalid node name",
        RefusalKind.INVALID,
        "a node of `exclude` or `sbatch` in the site file is gone: take it out",
    ),
    (r"reservation", RefusalKind.INVALID, "scontrol show reservation lists those there are"),
    (r"dependency", RefusalKind.INVALID, "the job to wait for is unknown: it ended long ago, or never was"),
    (
        r"unrecognized option|invalid option|does not look like a batch script",
        RefusalKind.INVALID,
        "look at the script with --dry-run, and at `sbatch` in the site file",
    ),
    (
        r"[Uu]nable to contact|[Ss]ocket timed out|Connection (refused|timed out|reset)|temporarily (un\w+)|try again"
        r"|slurm_persist|Unexpected message|Zero Bytes|Protocol authentication|munge|controller",
        RefusalKind.TRANSIENT,
        "the batch system is not well now: try again in a few minutes",
    ),
    (
        r"Permission denied|Host key|Could not resolve",
        RefusalKind.TRANSIENT,
        "the login node cannot be reached without a password: try `prefix` below `slurm` in the site file by hand",
    ),
)


def refusal(text: str) -> Refused:
    """Why sbatch said no, and what to do. What is not known is taken for a mistake of ours: repeating it would not
    mend it, and it is told in full."""
    for pattern, kind, remedy in _REFUSALS:
        if re.search(pattern, text):
            return Refused(kind, last_words(text), remedy)
    return Refused(RefusalKind.INVALID, last_words(text), "look at the script with --dry-run")


def last_words(text: str, characters_max: int = 300) -> str:
    """What a command said, in a line that can be shown, without its own name before each of its lines."""
    lines = [re.sub(r"^(sbatch|squeue|scancel|scontrol|srun): (error: )?", "", line) for line in text.splitlines()]
    line = " ".join(" ".join(lines).split())
    printable = "".join(character if character.isprintable() else "?" for character in line)
    return printable if len(printable) <= characters_max else printable[: characters_max - 1] + "…"


# -- maintenance -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that are kept for something else."""

    name: str
    starts_at_s: int
    ends_at_s: int
    maintenance: bool
    all_nodes: bool


def reservations_in(output: str) -> tuple[Reservation, ...]:
    """Of `scontrol --oneliner show reservation`; lines that are none are left out, and so are those without a time."""
    found: list[Reservation] = []
    for line in output.splitlines():
        if not line.startswith("ReservationName="):
            continue
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        starts_at_s, ends_at_s = moment_s(fields.get("StartTime", "")), moment_s(fields.get("EndTime", ""))
        flags = fields.get("Flags", "").split(",")
        if starts_at_s is not None and ends_at_s is not None:
            found.append(
                Reservation(fields["ReservationName"], starts_at_s, ends_at_s, "MAINT" in flags, "ALL_NODES" in flags)
            )
    return tuple(found)


RESERVATION_MARGIN_S = 300.0
"""Between a job's end and the maintenance: a job starts some time after it was submitted."""


def in_the_way(reservations: tuple[Reservation, ...], now_s: float, time_s: float) -> Reservation | None:
    """The first maintenance that begins before a job of `time_s` that starts now would end."""
    ahead = [one for one in reservations if one.maintenance and now_s < one.starts_at_s < now_s + time_s]
    return min(ahead, key=lambda one: one.starts_at_s, default=None)


def time_before(reservation: Reservation, now_s: float) -> float:
    """The longest time limit, in whole minutes as seconds, with which a job that starts soon ends before it."""
    return max(0.0, (reservation.starts_at_s - now_s - RESERVATION_MARGIN_S) // 60 * 60)


# -- for people ------------------------------------------------------------------------------------------------------

_REASONS: tuple[tuple[str, str], ...] = (
    (r"Priority$", "others are before it"),
    (r"Resources$", "it is next, and waits for free nodes"),
    (r"Reserved for maintenance", "a maintenance would begin before it ends; a shorter --time would start sooner"),
    (r"ReqNodeNotAvail|Nodes? .*(DOWN|DRAINED)", "the nodes it needs are down or reserved"),
    (r"PartitionTimeLimit$", "its time limit is above the partition's: it will never start"),
    (r"PartitionNodeLimit$|PartitionConfig$", "the partition does not have so many nodes: it will never start"),
    (r"PartitionDown$|PartitionInactive$", "the partition is closed"),
    (r"BeginTime$", "its start time has not come (a requeued job waits for two minutes)"),
    (r"DependencyNeverSatisfied$", "the job it waits for did not end as it should: it will never start"),
    (r"Dependency$", "it waits for another job"),
    (r"JobHeldUser$", "you hold it: scontrol release JOB"),
    (r"JobHeldAdmin$", "an administrator holds it"),
    (r"JobArrayTaskLimit$", "its array runs as many at once as it may"),
    (r"QOS.*(Limit|PerUser|PerAccount|Jobs|Nodes|GRES)|QOSNotAllowed", "a limit of the QOS is reached"),
    (r"Assoc", "a limit of the account is reached"),
    (r"InvalidAccount$|InvalidQOS$", "account or QOS are no longer valid: it will never start"),
    (r"BadConstraints$", "no node can ever have what it asks for"),
    (r"Licenses$", "it waits for licences"),
    (r"Reservation$", "it waits for its reservation"),
    (r"NodeDown$|NodeFail", "a node of it failed"),
    (r"launch failed|JobLaunchFailure", "its start failed on the node; it is held: scontrol release JOB"),
    (r"TimeLimit$", "its time was up"),
    (r"NonZeroExitCode$", "its command ended with an error; look at its output"),
    (r"RaisedSignal", "its command was ended by a signal"),
    (r"OutOfMemory$", "it took more memory than it asked for"),
    (r"Prolog$", "its nodes are being prepared"),
)


def plain_reason(reason: str) -> str:
    """The batch system's reason in plain words; itself when it is not a common one."""
    text = reason.strip("()")
    return next((plain for pattern, plain in _REASONS if re.search(pattern, text)), text)
