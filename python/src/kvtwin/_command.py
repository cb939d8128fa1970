"""The command `kvtwin`, which the package brings along."""

import pathlib
import shutil
import sys


def command_path() -> str:
    """Returns the path of the command: on PATH, or beside the interpreter."""
    beside = pathlib.Path(sys.executable).with_name("kvtwin")
    return shutil.which("kvtwin") or str(beside)
