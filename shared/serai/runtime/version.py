"""The version of this installation."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("serai")
except PackageNotFoundError:  # Run from a source tree that was never installed.
    VERSION = "0+unknown"
