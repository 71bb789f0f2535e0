"""The command line: the only module that prints and exits.

Exit codes: 0 nothing at or above --fail-on; 1 a finding at or above it; 2 usage, unreadable input, bad rule
file; 3 nothing found, but something at or above it is unknown; 70 an internal error.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in __main__.py
import os
import sys
from typing import Any, NoReturn

import click

from pgpreemptcheck import __version__
from pgpreemptcheck.errors import UserError, describe

FORMATS = ("text", "json")
SEVERITIES = ("critical", "high", "medium", "low", "never")

USAGE_ERROR = 2
INTERNAL_ERROR = 70


class InputError(click.ClickException):
    """Something that the user gave cannot be used: one line, exit 2."""

    exit_code = USAGE_ERROR


class DefaultCommand(click.Group):
    """A group whose default command is `check`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"--version", "--help", "-h"}
        if not args or (args[0].startswith("-") and args[0] not in own):
            args = ["check", *args]
        return super().parse_args(ctx, args)


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"pgpreemptcheck {__version__}")
        ctx.exit()


@click.group(cls=DefaultCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Print the version and exit.")  # fmt: skip
def program() -> None:
    """Is this host's PostgreSQL exposed to the Linux 7.0 preemption regression?

    Without a command: check (its options are taken too; see pgpreemptcheck check --help). Reads this host,
    or with --root a captured one, and changes nothing.
    """


def inspection_options(command: Any) -> Any:
    """Options that say what to look at, shared by check and facts."""
    options = [
        click.option("--root", metavar="PATH",
                     help="A captured directory, archive or sosreport instead of this host."),
        click.option("--pgdata", metavar="DIR", multiple=True,
                     help="One more data directory to look at (repeatable)."),
        click.option("--dsn", metavar="CONNINFO", help="Ask this server over SQL, as the calling user."),
        click.option("--no-sql", is_flag=True, help="Open no database connection."),
        click.option("--deep", is_flag=True, help="Also ask what costs more (pg_buffercache on large pools)."),
        click.option("--assume", metavar="[HORIZON:][CLUSTER:]FACT=VALUE", multiple=True,
                     help="What if: take this value for a fact (repeatable; names: rules schema)."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


rules_option = click.option(
    "--rules", "rules_dirs", metavar="DIR", multiple=True, help="Rules of your own, and thresholds (repeatable)."
)


@program.command()
@inspection_options
@rules_option
@click.option("--format", "output_format", type=click.Choice(FORMATS), help="text (default) or json.")
@click.option("-o", "outputs", metavar="FILE", multiple=True,
              help="Write to FILE instead; the format follows its suffix (.txt, .json; repeatable).")  # fmt: skip
@click.option("--fail-on", type=click.Choice(SEVERITIES), default="high", show_default=True,
              help="Exit 1 for a finding of this severity or worse, 3 if one may be there.")  # fmt: skip
def check(rules_dirs: tuple[str, ...], output_format: str | None, outputs: tuple[str, ...], fail_on: str,
          **what: Any) -> None:  # fmt: skip
    """Check this host and print the report (the default command).

    \b
    Exit codes: 0 nothing at or above --fail-on    1 a finding at or above it
                2 usage or unreadable input        3 something there is unknown
                70 internal error
    """
    from pgpreemptcheck import run

    formats: list[tuple[str, str | None]] = [(_format_of(path, output_format), path) for path in outputs]
    formats = formats or [(output_format or "text", None)]
    try:
        report = run.check(_options(what), rules_dirs=rules_dirs, fail_on=fail_on)
    except (UserError, click.ClickException):
        raise
    except Exception as error:  # whoever waits for JSON must not find an empty file
        for path in [path for chosen, path in formats if chosen == "json"]:
            _write(run.failure(describe(error)), path)
        raise
    _write_report(report, formats)
    sys.exit(report.exit_code)


@program.command()
@inspection_options
def facts(**what: Any) -> None:
    """Print the facts as JSON; exits 0 whenever it printed them."""
    from pgpreemptcheck import run

    _emit(run.facts(_options(what)))


@program.command()
@rules_option
@click.option("--format", "output_format", type=click.Choice(FORMATS), default="text", help="text (default) or json.")
@click.option("--fail-on", type=click.Choice(SEVERITIES), default="high", show_default=True)
def demo(rules_dirs: tuple[str, ...], output_format: str, fail_on: str) -> None:
    """Print the report for a bundled capture of the published 96-vCPU case."""
    from pgpreemptcheck import run

    report = run.check(run.demo_options(), rules_dirs=rules_dirs, fail_on=fail_on)
    _write_report(report, [(output_format, None)])
    sys.exit(report.exit_code)


@program.group(name="rules")
def rules_group() -> None:
    """Look at the rules: list, show one, run their own tests, list the facts that they can use."""


@rules_group.command(name="list")
@rules_option
def rules_list(rules_dirs: tuple[str, ...]) -> None:
    """List all rules: id, severity, title."""
    from pgpreemptcheck import run

    _emit(run.rules_list(rules_dirs))


@rules_group.command(name="show")
@rules_option
@click.argument("rule_id")
def rules_show(rules_dirs: tuple[str, ...], rule_id: str) -> None:
    """Explain one rule: what it compares, why, its cut-offs and references."""
    from pgpreemptcheck import run

    _emit(run.rules_show(rules_dirs, rule_id))


@rules_group.command(name="test")
@rules_option
def rules_test(rules_dirs: tuple[str, ...]) -> None:
    """Run the tests that the rules carry; exits 1 if one fails."""
    from pgpreemptcheck import run

    text, failed = run.rules_test(rules_dirs)
    _emit(text)
    sys.exit(1 if failed else 0)


@rules_group.command(name="schema")
def rules_schema() -> None:
    """List every fact that a rule or --assume can name: name, type, unit, meaning."""
    from pgpreemptcheck import run

    _emit(run.rules_schema())


def _options(what: dict[str, Any]) -> Any:
    from pgpreemptcheck.run import Options

    if what["root"] is not None and os.path.realpath(what["root"]) != "/" and what["dsn"]:
        raise InputError("--dsn asks a live server, --root reads a captured host: give one of them")
    return Options(**what)


def _format_of(path: str, given: str | None) -> str:
    suffixes = {".json": "json", ".txt": "text"}
    found = given or suffixes.get(os.path.splitext(path)[1])
    if found is None:
        raise InputError(f"-o {path}: expected a name ending in .txt or .json, or --format")
    return found


def _write_report(report: Any, formats: list[tuple[str, str | None]]) -> None:
    from pgpreemptcheck import run

    for output_format, path in formats:
        encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
        colour = (
            sys.stdout is not None
            and sys.stdout.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
        to_file = path is not None
        width = None if to_file else _columns()
        text = run.render(
            report, output_format, colour=colour and not to_file, unicode=to_file or "utf" in encoding, width=width
        )
        _write(text, path)


def _columns() -> int | None:
    """Return the width of the terminal, None where there is none; COLUMNS says otherwise, as for other programs."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdigit() and len(given) < 5 and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def _write(text: str, path: str | None) -> None:
    if path is None:
        _emit(text)
    else:
        _write_file(path, text)


def _write_file(path: str, text: str) -> None:
    """Write beside the target and rename, so that a reader never sees half a report; a device or pipe is written to."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        _write_into(path, text)
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError as error:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise InputError(f"-o {path}: {error.strerror}") from None


def _write_into(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise InputError(f"-o {path}: {error.strerror}") from None


def _emit(text: str) -> None:
    """Write to stdout; a reader that went away (`| head`, or a closed stdout) ends the run quietly."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(f"standard output: {error.strerror}") from None


def _complain(text: str) -> None:
    """Write one line to stderr; that it cannot be written must not change the exit code."""
    from pgpreemptcheck.printable import printable

    try:
        click.echo(f"pgpreemptcheck: {printable(text)}", err=True)
    except (OSError, AttributeError):
        pass


def main() -> NoReturn:
    """Run the command line; an internal error is one line and exit 70."""
    try:
        if callable(_signal.getsignal(_signal.SIGINT)):  # __main__.py ended the run at once so far
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        program.main(standalone_mode=False)
    except click.ClickException as error:
        if isinstance(error, click.UsageError):
            error.show()
        else:
            _complain(error.format_message())
        sys.exit(USAGE_ERROR)
    except UserError as error:
        _complain(str(error))
        sys.exit(USAGE_ERROR)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        _complain("interrupted")
        sys.exit(130)
    except Exception as error:
        _complain(f"internal error: {describe(error)}; please report it")
        sys.exit(INTERNAL_ERROR)
    sys.exit(0)
