"""Printing a command's result so that a closed or full stdout is an error of one line."""

from __future__ import annotations

import contextlib
import os
import sys

from stitch.errors import Unavailable

__all__ = ["print_result"]


def print_result(text: str) -> None:
    """Print and flush `text`; characters that stdout's encoding lacks are escaped.

    Raises: Unavailable if stdout is full, broken or closed by its reader.
    """
    try:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode("ascii"), flush=True)
    except OSError as error:
        # What is still buffered would fail once more when the interpreter exits.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
        raise Unavailable(
            f"cannot print the result: {error.strerror or error}", errno=error.errno
        ) from error
