"""Run a command that gets SIGKILL when the thread that started this one ends (Linux).

Usage: python -I -S launch.py PARENT_PID COMMAND ARGUMENT…
Standard library only: it runs before anything of the command is imported. The death signal
survives exec, so the command itself needs to know nothing of it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, make sure that the parent still lives, become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before the request: nobody would ever end the command
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
