"""The `accel` command. A subcommand's module is imported when it is called, so that none pays for the others."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import Any

import click

from accel import __version__
from accel.commands.script_job import ScriptJob
from accel.errors import AccelError

UNUSABLE = 2

_HOMES = {
    "report": "accel.commands.reports",
    "compare": "accel.commands.reports",
    "run": "accel.commands.run",
    "profile": "accel.commands.profile",
    "doctor": "accel.commands.doctor",
    "bench": "accel.commands.bench",
    "cluster": "accel.commands.cluster",
    "submit": "accel.commands.jobs",
    "cancel": "accel.commands.jobs",
    "logs": "accel.commands.jobs",
    "tune": "accel.commands.tune",
    "mcp": "accel.commands.mcp",
}
"""Subcommand → module that holds it."""


_HAVE_SCRIPTS = frozenset({"run", "profile"})
"""Subcommands that take a script with arguments of its own."""
_MEANT = {"optimize": "run", "launch": "run", "train": "run", "env": "doctor", "info": "doctor", "explain": "report"}
"""Names of other tools' commands → ours."""


class _Group(click.Group):
    """A group that prints accel's errors as one line, with exit status 2, and imports a subcommand when it is called.

    After `LazyGroup` in click's documentation.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _HOMES:
            return None
        command: click.Command = getattr(import_module(_HOMES[cmd_name]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a subcommand; for an unknown one name the one that was likely meant."""
        name = args[0]
        if name not in _HOMES and not name.startswith("-"):
            near = [_MEANT[name]] if name in _MEANT else difflib.get_close_matches(name, _HOMES, n=1)
            meant = f"run {name}" if name.endswith(".py") else next(iter(near), "")
            ctx.fail(f"No such command {name!r}." + (f" Did you mean `accel {meant}`?" if meant else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AccelError as error:
            from accel.report.words import clean

            click.echo(f"error: {clean(error)}", err=True)
            ctx.exit(UNUSABLE)

    def prepared(self, *args: Any, **kwargs: Any) -> ScriptJob | None:
        """Run a command; if it has a script to run, return that instead, so that it runs outside of click's frames."""
        jobs: list[ScriptJob] = []
        # On Windows click would expand `*`, `~` and `%NAME%` in the script's own arguments too.
        expands = not _HAVE_SCRIPTS.intersection(sys.argv[1:2])
        try:
            self.main(*args, obj=jobs, windows_expand_args=expands, **kwargs)
        except SystemExit:
            if not jobs:
                raise
        return jobs[0] if jobs else None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run a command."""
        job = self.prepared(*args, **kwargs)
        if job is not None:
            with job:
                exec(job.script.code(), job.script.globals)
            job.leave()


@click.group(cls=_Group)
@click.version_option(__version__, prog_name="accel")
def main() -> None:
    """Make an unmodified training script faster, profile it, and read and compare the reports."""
