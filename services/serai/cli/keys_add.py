"""Makes an API key and stores its hash. The key is printed once, on standard output; nobody can read it again."""

from __future__ import annotations

import argparse
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from serai.cli.keys_file_flag import add_keys_file
from serai.ingress.access import BadKeysFile, StoredKey, hashed, new_key, providers_of, read_keys, write_keys
from serai.ingress.configuration import DEFAULT_PROJECT
from serai.ingress.queueing import CLASSES
from serai.ingress.requirements import BadHeader

_SPAN = re.compile(r"(\d{1,5})([hdwy])")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24, "y": 365 * 24}
_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,128}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=_name, help="whose key it is; shown in lists, logs and usage records")
    add_keys_file(parser, "; made when it does not exist")
    parser.add_argument(
        "--project", default=DEFAULT_PROJECT, help="of the ingress's configuration (default: %(default)s)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        action="extend",
        metavar="PATTERN",
        help="models it may use, as 'llama-*' (default: all of its project)",
    )
    parser.add_argument(
        "--providers",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="who may answer, as alps; or may not, as --providers=-cloud (default: as its project)",
    )
    parser.add_argument(
        "--expires",
        type=_moment,
        metavar="WHEN",
        help="30d, 12h, 4w, 1y from now, or a day as 2027-01-31, from whose beginning (UTC) it is no longer taken",
    )
    parser.add_argument("--rpm", type=_whole, metavar="N", help="requests per minute at most")
    parser.add_argument("--tpm", type=_whole, metavar="N", help="tokens per minute at most")
    parser.add_argument("--concurrent", type=_whole, metavar="N", help="requests at once at most")
    parser.add_argument(
        "--budget", type=_amount, metavar="AMOUNT", help="what it may spend in a period of its project, as 12.50"
    )
    parser.add_argument("--priority", choices=CLASSES, help="its highest class in queues (default: its project's)")


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.keys_file
    secret = new_key()
    key = StoredKey(
        name=arguments.name,
        sha256=hashed(secret),
        project=arguments.project,
        models=tuple(arguments.models) if arguments.models is not None else None,
        providers=tuple(arguments.providers),
        priority=arguments.priority,
        expires=arguments.expires,
        requests_per_minute=arguments.rpm,
        tokens_per_minute=arguments.tpm,
        concurrent_max=arguments.concurrent,
        budget_micros=arguments.budget,
    )
    try:
        providers_of(key)
        keys = read_keys(path) if path.exists() else []
        if any(other.name == key.name for other in keys):
            sys.stderr.write(f"serai keys add: {path} has a key named {key.name!r}; remove it first\n")
            return 2
        write_keys(path, [*keys, key])
    except BadHeader as error:
        sys.stderr.write(f"serai keys add: --providers: {str(error).partition(': ')[2]}\n")
        return 2
    except BadKeysFile as error:
        sys.stderr.write(f"serai keys add: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"serai keys add: cannot write the keys file {path}: {error.strerror}\n")
        return 2
    print(secret)
    return 0


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: up to 128 characters without spaces")
    return text


def _moment(text: str) -> datetime:
    if span := _SPAN.fullmatch(text):
        return (datetime.now(UTC) + timedelta(hours=int(span[1]) * _HOURS[span[2]])).replace(microsecond=0)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write 30d, 12h, 4w, 1y, or a day as 2027-01-31") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    if moment <= datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"{text!r} is over")
    return moment


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, 0 or more")
    return int(text)


def _amount(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: write an amount as 12 or 12.50")
    whole, _, part = text.partition(".")
    return int(whole) * 1_000_000 + int(part.ljust(6, "0"))
