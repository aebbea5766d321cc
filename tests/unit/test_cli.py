"""The command line: one-line usage errors, exit codes, nothing loaded that is not used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stitch import cli


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bogus"], "invalid choice"),
        ([], "COMMAND"),
        (["materialize"], "required"),
        (["materialize", "--bse", "x"], "required"),
        (["status", "--what"], "unrecognized arguments: --what"),
        (["gateway", "--port", "x", "--member", "u"], "invalid int value"),
    ],
)
def test_usage_errors_take_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert cli.COMMANDS[name][1].split()[0] in capsys.readouterr().out


def test_help_loads_no_command() -> None:
    code = (
        "import sys; from stitch import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('stitch.commands')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
