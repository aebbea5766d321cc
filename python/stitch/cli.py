"""The `stitch` command: parses arguments and hands over to one module per subcommand.

Exit codes: 0 done; 1 the data or the outcome is at fault; 2 usage or environment.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any, Final, NoReturn

from stitch import __version__
from stitch.errors import StitchError

__all__ = ["CommandParser", "main"]

# subcommand -> (module, one-line help); modules load only when their command runs
COMMANDS: Final = {
    "demo": (
        "stitch.commands.demo",
        "run a small asynchronous RL job with replicas that die and join",
    ),
    "materialize": (
        "stitch.commands.materialize",
        "rebuild one version from a base and its updates",
    ),
    "bootstrap": (
        "stitch.commands.bootstrap",
        "materialize the newest eligible version from a store",
    ),
    "replica": ("stitch.commands.replica", "run one replica: sidecar, reconciler and engine"),
    "gateway": ("stitch.commands.gateway", "run the pool's front door"),
    "status": ("stitch.commands.status", "show a store, and the replicas behind a gateway"),
    "store": ("stitch.commands.store", "inspect a store: show, verify"),
    "init-model": ("stitch.commands.init_model", "write a tiny random model checkpoint"),
}


class _Formatter(argparse.HelpFormatter):
    """Room for names and options beside their help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
        self._action_max_length = 16  # argparse forgets the indent of subcommands


class CommandParser(argparse.ArgumentParser):
    """Answers a usage error in one line and exits 2; `error_suffix` ends that line."""

    error_suffix = "; see --help"

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}{self.error_suffix}\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command line. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = CommandParser(
        prog="stitch", description="The versioned control plane for disaggregated RL."
    )
    parser.add_argument("--version", action="version", version=f"stitch {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    subparsers: dict[str, CommandParser] = {}
    for name, (module, summary) in COMMANDS.items():
        subparsers[name] = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            importlib.import_module(module).configure(subparsers[name])
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparsers[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(importlib.import_module(COMMANDS[options.command][0]).run(options))
    except StitchError as error:
        message = " ".join(error.message.split())
        print(f"stitch {options.command}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
