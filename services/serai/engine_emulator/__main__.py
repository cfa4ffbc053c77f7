"""`python -m serai.engine_emulator`: the emulated engine without the rest of the command line."""

from __future__ import annotations

import argparse
import sys

from serai.engine_emulator import command


def main() -> int:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(prog="serai engine emulate")
    command.add_arguments(parser)
    return command.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
