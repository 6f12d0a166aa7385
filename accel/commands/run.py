"""`accel run`: run an unmodified script, with `accel.optimize` on what it is seen to train."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel import startup
from accel.commands.script_job import ScriptJob, check_script, own_arguments, say, training_in_children
from accel.errors import InvalidArgument
from accel.exactness import LEVELS, check_level
from accel.files import check_folder, check_report

if TYPE_CHECKING:
    from accel.profiler.script import Ending, Script
    from accel.script.training import ScriptTraining

REQUEUE = 75
"""The EX_TEMPFAIL of sysexits.h: SLURM queues a job that ends so again where slurm.conf has RequeueExit=75."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S, _SHARE = 120.0, 0.1
"""Before the limit a training is told to end: a tenth of the time, at most two minutes."""
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below those that Linux gives to connections."""
_NEEDED = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID")
"""Of a task that srun has started; in a batch script itself there is no step."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as with python -m.")
@click.option(
    "--allow", default="reordered", show_default=True, metavar="|".join(LEVELS), help="How far the numbers may move."
)
@click.option("--budget", default="3%", show_default=True, metavar="90s|3%", help="What the search may cost.")
@click.option("--report", type=click.Path(path_type=Path), help="A folder, a .json or a .html file for the report.")
@click.option("--enable", multiple=True, metavar="NAME", help="A strategy to try although it is opt-in; repeatable.")
@click.option("--disable", multiple=True, metavar="NAME", help="A strategy not to try; repeatable.")
@click.option(
    "--patch",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write what was kept as a diff of the script, which then needs no accel.",
)
@click.option("--nproc", type=click.IntRange(1), help="Start so many ranks on this machine, as torchrun does.")
@click.option("--cache/--no-cache", default=True, help="Remember what is found for the next run; default --cache.")
@click.option("--until", metavar="2h|slurm", help="Save, and end with status 75, before so long, or SLURM's own limit.")
@click.pass_context
def run(
    context: click.Context,
    script: str,
    arguments: tuple[str, ...],
    module: bool,
    allow: str,
    budget: str,
    report: Path | None,
    enable: tuple[str, ...],
    disable: tuple[str, ...],
    patch: Path | None,
    nproc: int | None,
    cache: bool,
    until: str | None,
) -> None:
    """Run SCRIPT with its own ARGUMENTS, and make its training faster.

    \b
        accel run train.py -- --epochs 10
        accel run --allow reduced --report runs/one train.py
        torchrun --nproc-per-node 2 -m accel run train.py
        srun accel run --until slurm train.py
        accel run --nproc 2 train.py
        torchrun --nnodes 2 --nproc-per-node 2 -m accel run train.py

    The script runs unmodified, as with `accel.optimize` on the models, loaders and optimizers that it is seen to train.
    Its output and its exit status are its own; what accel says goes to stderr. ACCEL=0 runs it plainly.
    """
    from accel.profiler.script import Script

    check_script(script, module)
    if nproc is not None:
        start_ranks(nproc, sys.argv[1:])
        return
    if "SLURM_PROCID" in os.environ:
        os.environ.update(torch_variables(os.environ))
    limit = None if until is None else TimeLimit(seconds_until(until, os.environ))
    options = {**_checked(allow, budget, report, enable, disable), "cache": cache}
    if patch is not None:
        check_folder("--patch", patch)
    RunJob(Script(script, own_arguments(arguments), module=module), options, patch, limit).begin(context)


def start_ranks(count: int, arguments: list[str]) -> None:
    """Run the same command on so many ranks of this machine, by torchrun, with a store on a free port.

    Args:
        count: of ranks.
        arguments: of `accel`, with `--nproc`.

    Raises:
        InvalidArgument: if torchrun has started this process already.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InvalidArgument("--nproc must not be given under torchrun, which has started this rank; leave one out")
    from torch.distributed import run as torchrun

    at = next(i for i, each in enumerate(arguments) if each.split("=")[0] == "--nproc")
    own = arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]
    torchrun.main(["--standalone", f"--nproc-per-node={count}", "-m", "accel", *own])


def _checked(
    allow: str, budget: str, report: Path | None, enable: tuple[str, ...], disable: tuple[str, ...]
) -> dict[str, Any]:
    """Return the options as `accel.optimize` takes them."""
    from accel.search.budget import Budget

    check_level("--allow", allow)
    Budget.parse(budget)
    if report is not None:
        report = report.absolute()  # the script may change its directory
        check_report("--report", report)
    if enable or disable:
        _check_names("--enable", enable)
        _check_names("--disable", disable)
        both = set(enable) & set(disable)
        if both:
            raise InvalidArgument(f"--enable and --disable both name {', '.join(sorted(both))}; keep it in one")
    return {"allow": allow, "budget": budget, "report": report, "enable": enable, "disable": disable}


def registered_strategies() -> frozenset[str]:
    """Return the names of the strategies as their modules have them, since importing the registry would bring torch."""
    files = (Path(__file__).parents[1] / "strategies").glob("*.py")
    return frozenset(
        re.findall(r'^    name = "(\w+)"', "".join(each.read_text("utf-8") for each in files), re.MULTILINE)
    )


def _check_names(option: str, given: tuple[str, ...]) -> None:
    """Raise InvalidArgument if there is no such strategy."""
    if not registered_strategies().issuperset(given):
        from accel import strategies

        strategies.check_names(option, given)


class RunJob(ScriptJob):
    """A script to run with `accel.optimize` on what it trains.

    Args:
        script: what to run.
        options: of `accel.optimize`.
        patch: where the kept plan goes as a diff of the script; None for nowhere.
        limit: on its time; None for none.
    """

    def __init__(
        self, script: Script, options: dict[str, Any], patch: Path | None = None, limit: TimeLimit | None = None
    ) -> None:
        super().__init__(script)
        self._limit = limit
        self._options, self._thread = options, threading.get_ident()
        self._patch, self._folder = patch and patch.absolute(), Path.cwd()  # the script may change its directory
        self._training: ScriptTraining | None = None

    def __enter__(self) -> None:
        super().__enter__()
        startup.command_line_ends()
        if startup.is_off():
            self.script.untouched()  # nothing is to be concluded: SIGTERM ends the process as it does the plain script
        else:
            self.begin_after_torch()
        if self._limit is not None:
            self._limit.begin()

    def start(self) -> None:
        """Follow the training."""
        with startup.counted():
            from accel.script.training import ScriptTraining

        whole = "run it with --report FOLDER"
        self._training = ScriptTraining(self._options, self._thread, whole)
        self._training.start()

    def leave_alone(self) -> None:
        """Restore torch."""
        if self._training is not None:
            self._training.stop()

    def conclude(self) -> None:
        """Restore torch, and say why nothing was made faster if that is so; a report comes when the process ends."""
        if self._limit is not None:
            self.script.ending = self._limit.ending(self.script.ending)
        why = "the script did not import torch, so nothing in it can be made faster"
        if self._training is not None:
            self._training.stop()
            why = self._training.why_nothing()
            if self._patch is not None and os.environ.get("RANK", "0") == "0":
                from accel.script.patch import write_patch

                say(f"accel: {write_patch(Path(str(self.script.globals.get('__file__'))), self._folder, self._patch)}")
        failed = self.script.ending.text.startswith("raised")  # its traceback says why
        if why and not failed and not startup.is_off() and os.environ.get("RANK", "0") == "0":
            say(f"accel: nothing was made faster: {why}")
            has_workers = self._training is not None and self._training.loaders.has_workers
            if not has_workers and (children := training_in_children("run")):  # else the loaders' own may have run
                say(children)
        torch: Any = sys.modules.get("torch")
        if torch is not None and "RANK" not in os.environ and torch.cuda.is_available():
            used = [torch.cuda.memory_reserved(gpu) > 0 for gpu in range(torch.cuda.device_count())]
            if unused := unused_gpus(used):
                say(unused)


def unused_gpus(used: list[bool]) -> str:
    """Return what DistributedDataParallel would give a script that has used some of the machine's GPUs; '' if all.

    Args:
        used: of each GPU, whether this process has memory there.
    """
    if all(used) or not any(used):
        return ""
    return (
        f"accel: the script used {sum(used)} of {len(used)} GPUs; with DistributedDataParallel, started by accel run "
        f"--nproc {len(used)}, it could train up to {len(used) / sum(used):g} times as many samples a second"
    )


# --- under a batch system ---------------------------------------------------------------------------------------------


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torch.distributed needs to know of a task of `srun`; nothing elsewhere, alone, or under torchrun.

    The rendezvous is on the first node, where task 0 is; its port is the same on all.
    https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES

    Args:
        environment: of this process.

    Raises:
        InvalidArgument: if a variable of SLURM's is not as its manual says.

    Example:
        >>> torch_variables({"RANK": "3", "SLURM_PROCID": "0"})
        {}
    """
    if "RANK" in environment or not set(_NEEDED).issubset(environment) or environment["SLURM_NTASKS"] == "1":
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_NTASKS"]
    try:
        job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment["SLURM_STEP_ID"])
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_NTASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_tasks_by_node(tasks)[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node(nodes),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + (job + step) % _PORTS),
        }
    except (ValueError, IndexError):
        given = {name: value for name, value in environment.items() if name.startswith("SLURM_STEP") or name in _NEEDED}
        raise InvalidArgument(f"SLURM's variables must be as its manual says. Found: {given}") from None


def first_node(nodes: str) -> str:
    """Return the first host of a list in SLURM's form.

    Example:
        >>> first_node("gpu[007-012,020],login1")
        'gpu007'
    """
    first = re.match(r"[^,\[]+(?:\[([^,\-\]]+)[^\]]*\])?[^,\[]*", nodes)
    if first is None:
        raise InvalidArgument(nodes)
    return first[0] if first[1] is None else re.sub(r"\[.*\]", first[1], first[0])


def _tasks_by_node(tasks: str) -> list[int]:
    """Return how many tasks each node has: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in tasks.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


def seconds_until(text: str, environment: Mapping[str, str]) -> float:
    """Return the seconds to a limit from now on.

    Args:
        text: such as `90s`, `30m` or `2h` from the start of this process; `slurm` for the end of the SLURM job.
        environment: of this process.

    Raises:
        InvalidArgument: if it is neither, is over, or there is no SLURM job that says when it ends.
    """
    from accel.profiler.host import seconds_since_start

    if "TORCHELASTIC_RUN_ID" in environment:
        raise InvalidArgument("--until must be given without torchrun, which would start the ranks again; use srun")
    if text == "slurm":
        end = environment.get("SLURM_JOB_END_TIME", "")
        if not end.isdecimal():
            raise InvalidArgument(f"--until slurm must be in a SLURM job with SLURM_JOB_END_TIME. Found: {end!r}")
        left_s = int(end) - time.time()
    else:
        number = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
        if number is None:
            raise InvalidArgument(f"--until must be a time such as '90s', '30m' or '2h', or 'slurm'. Found: {text!r}")
        left_s = float(number[1]) * _UNITS[number[2]] - seconds_since_start()
    if left_s <= 0:
        raise InvalidArgument(f"--until must be a time to come. Found: {text!r}, over for {-left_s:.0f} s")
    return left_s


class TimeLimit:
    """Tell this process to end before a limit: SIGTERM, a checkpoint after the step under way, then `REQUEUE`.

    Args:
        left_s: seconds to the limit.
    """

    def __init__(self, left_s: float) -> None:
        self.is_saved = False
        """The time was over, and the training saves a checkpoint: it can be queued again."""
        self._timer = threading.Timer(left_s - min(_LONGEST_S, _SHARE * left_s), self._over)
        self._timer.daemon = True

    def begin(self) -> None:
        """Let the time run."""
        self._timer.start()

    def ending(self, ending: Ending) -> Ending:
        """Let no more time run: the script has ended; return how, for the process's exit status."""
        from accel.profiler.script import TERMINATED, Ending

        self._timer.cancel()
        return Ending(REQUEUE, "out of time") if self.is_saved and ending.status == TERMINATED else ending

    def _over(self) -> None:
        elastic = sys.modules.get("accel.elastic.run")
        self.is_saved = elastic is not None and any(run.checkpoint is not None for run in elastic.RUNS.values())
        saved = "it saves and ends" if self.is_saved else "it ends; nothing is saved without accel.Elastic(checkpoint=)"
        if os.environ.get("RANK", "0") == "0":
            say(f"accel: the time of the script is over: {saved}")
        os.kill(os.getpid(), signal.SIGTERM)
