"""What the one line gives on a GPU, beside what an expert gets by hand: three calls that fit 15 minutes together.

    python3 -m benchmarks.gpu.decisive prewarm | table | second [--out FOLDER] [--limit-s SECONDS]

docs/gpu.md says what they do. Each writes its figures after each row, prints the table last, and leaves out what is
measured on this machine already. Processes of `table` and `second` run one after the other, and import and make their
data while another is timed. `--size tiny` runs on a CPU, too.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import click
import torch

from accel.profiler.host import usable_cores
from benchmarks.gpu import decisive_tables, processes
from benchmarks.gpu.processes import Ended, Job, Queue
from benchmarks.gpu.results import Results, is_green, sources
from benchmarks.gpu.sections import LIBRARY, SECTIONS
from benchmarks.record import DATA, FOLDER
from benchmarks.render import Row
from benchmarks.suite import MODELS as ALL_MODELS
from benchmarks.variants import BY_HAND, PLANNED
from benchmarks.variants.recipes import ON_A_GPU
from benchmarks.whole_process import Course

CACHE = DATA / "decisive"
"""Kept from call to call on a machine, where the folder of the results may be emptied."""
MODELS = ("resnet", "swin", "bert", "gpt", "yolox", "vit", "unet")
FIRST_MODELS = 4
"""The others while there is time left."""
STEP_GB = {"resnet": 8, "swin": 12, "bert": 20, "gpt": 26, "yolox": 10, "vit": 8, "unet": 36}
"""Most memory of a compiled step in float32, by reckoning; BERT's plain one was measured, 17.6."""
TESTS_GB = 10.0
TESTS_S = 150.0
"""On 12 of 16 cores they took 117 to 145 s."""
REPEATED = ("resnet", "bert", "gpt", "yolox", "vit")
"""Models of whose blocks accel compiles one for all. A whole model takes longer than the budget of a search."""
WITH_IMAGES = ("resnet", "yolox", "vit")
"""Of those: accel's recipe has channels_last, too, which changes the graphs."""
COMPILE_PLAN_S = 60.0
"""At most, of a process with such a plan, which is switched on after some steps."""
SUITE = ("benchmarks/suite", "benchmarks/variants", "benchmarks/whole_process.py")
"""What all rows depend on."""
COMPILED = f"{BY_HAND}{', '.join(ON_A_GPU)}"
SETTLED_S = 3.0
"""How long a process trains on after its time: what is compared are the steps of these seconds."""
AHEAD = 3
"""Processes that prepare themselves while another is timed."""
LOSSES = 10
"""Steps whose mean loss is kept, of the first `MOST_LOSSES` steps."""
MOST_LOSSES = 400
LIMITS_S = {"prewarm": 210, "table": 380, "second": 140}
"""Of the parts; with the start of a machine and transfers they fit 15 minutes."""


class Way(NamedTuple):
    """How a model is trained."""

    variant: str
    """Of benchmarks/variants."""
    run_s: float
    """After the third step; under accel until the search has ended, as expected by the played H200."""
    options: tuple[str, ...] = ()
    """More of them for the process."""
    start_s: float = 5.0
    """Expected before the third step: the device's start, kernels loaded, what was compiled loaded."""


WAYS = {
    "plain": Way("plain", 5.0),
    "by hand": Way(COMPILED, 4.0, start_s=15.0),
    "reduced": Way("reduced", 42.0, ("--budget=25s",)),
    "TF32": Way(f"{BY_HAND}tf32", 4.0),
    "compile": Way("compile", 4.0, start_s=15.0),
    "plain, another seed": Way("plain", 5.0, ("--seed=1",)),
    "reordered": Way("reordered", 25.0, ("--budget=25s",)),
    "second": Way("reduced", 22.0, ("--budget=25s",)),
}
FIRST = ("plain", "by hand", "reduced")
MOST_SEARCH = 1.5
"""So many times as long as is expected a search is waited for."""
MOST_START_S = 60.0
"""Beyond its time a process may take so long to start: what was not compiled before is compiled then."""


@dataclass(frozen=True)
class Settings:
    """What a call is asked for."""

    cache: Path
    """What is compiled and remembered, and the figures so far."""
    size: str = "full"
    pace: float = 1.0
    """All times are multiplied by it."""
    models: Sequence[str] = MODELS
    tests: bool = True

    @property
    def lock(self) -> Path:
        """Who has it may use the device."""
        return self.cache / "device.lock"

    @property
    def compilers(self) -> dict[str, str]:
        """The variable that names the folder of what is compiled."""
        return {"TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor")}

    def environ(self, *accel: str) -> dict[str, str]:
        """Return the variables that name the cache folders; `accel` is the part that holds what accel remembers."""
        return {**self.compilers, "ACCEL_CACHE": str(self.cache.joinpath("accel", *accel))}


Left = Callable[[], float]
"""Returns the seconds that are left."""


def prewarm(results: Results, settings: Settings, left_s: Left) -> None:
    """Measure the device's ceilings, fill the compilers' cache, and run the tests beside."""
    settings.cache.mkdir(parents=True, exist_ok=True)
    if not results.is_known("ceilings"):
        run_section("ceilings", results, settings, min(SECTIONS["ceilings"].limit_s, left_s()))
    jobs = list(_compilations(results, settings, left_s))
    if settings.tests and not is_green(results.figures) and left_s() > TESTS_S:
        jobs.insert(0, processes.gpu_tests(left_s(), TESTS_GB))
    gb = torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else 64.0
    for ended in Queue(width=max(2, usable_cores() // 2), gb=0.9 * gb).run(jobs, left_s):
        if "tests" in ended.job.key:
            if "green" in ended.figures:  # they came to their end
                results.put("tests", {**ended.figures, "sources": sources(*LIBRARY, "tests")})
        else:
            _add(results, "compiling", ended, compiled_row(ended.figures))


def _compilations(results: Results, settings: Settings, left_s: Left) -> Iterator[Job]:
    """Yield what is to be compiled, in the order in which it is worth the time."""
    first = settings.models[:FIRST_MODELS]
    kinds = [*product(first, [COMPILED]), *((model, compile_plan(model)) for model in first if model in REPEATED)]
    environ = {**settings.environ("compiling"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    for number, (model, variant) in enumerate(kinds):
        key = {"model": model, "variant": variant, "size": settings.size, "source": sources(*SUITE, *LIBRARY)}
        own = settings.cache / f"compiling-{number}.lock"  # held by nobody else: they run together
        times = ["--hold=0.1", f"--seconds={COMPILE_PLAN_S * settings.pace}", "--settled=0", f"--lock={own}"]
        arguments = ["-m", "benchmarks.whole_process", model, variant, f"--size={settings.size}", *times]
        if not results.has("compiling", key):
            yield Job(key, arguments, 0.0, left_s(), 0.6 * STEP_GB.get(model, 8), environ)  # it is in bfloat16


def compile_plan(model: str) -> str:
    """Return the variant that compiles the graphs of a model's blocks as accel's recipe has them."""
    return f"{PLANNED}autocast_bf16, {'channels_last, ' if model in WITH_IMAGES else ''}torch_compile=blocks"


def compiled_row(figures: Row) -> Row:
    """Return what the steps took beyond the shortest, which is what compiling took, s; and what became of a plan."""
    if "ends_s" not in figures:
        return figures
    ends_s = [0.0, *figures["ends_s"]]
    steps_s = [after - before for before, after in pairwise(ends_s)]
    row = {"compile_s": sum(steps_s) - min(steps_s) * len(steps_s)}
    plan = [each for each in figures["rows"] if each["name"] == "torch_compile"]
    return {**row, **({"status": plan[0]["status"], "why": plan[0]["why"]} if plan else {})}


def table(results: Results, settings: Settings, left_s: Left) -> None:
    """Train each model in each way."""
    first, more = settings.models[:FIRST_MODELS], settings.models[FIRST_MODELS:]
    seeds, levels = product(first, ["plain, another seed"]), product(first[:3], ["reordered"])
    order = [*product(first, FIRST), *seeds, *product(more[:1], FIRST)]
    order += [*product(first, ["TF32", "compile"]), *levels, *product(more[1:], FIRST)]
    _train("table", order, results, settings, left_s)


def second(results: Results, settings: Settings, left_s: Left) -> None:
    """Train each model with what accel remembers; then race what a first table leaves open."""
    first = settings.models[:FIRST_MODELS]
    trained = [model for model in first if results.has("table", _job(model, "reduced", settings).key)]
    if not trained:
        print("no second runs: these sources have no first ones on this machine", flush=True)
    _train("second", product(trained, ["second"]), results, settings, left_s)
    for name in decisive_tables.RACES:
        if not results.is_known(name) and left_s() > 0 and (name == "overhead" or torch.cuda.is_available()):
            run_section(name, results, settings, min(SECTIONS[name].limit_s * settings.pace, left_s()))


def run_section(name: str, results: Results, settings: Settings, limit_s: float) -> None:
    """Run a section for so long at most; without earlier figures its own are on disk as they come.

    Earlier ones stay until it has run to its end.
    """
    print(f"== {name}", flush=True)
    mark = {"sources": sources(*SECTIONS[name].sources)}
    is_new = "failed" in results.figures.get(name, {"failed": "never run"})
    began = time.monotonic()

    def publish(figures: Row) -> None:
        if is_new:
            results.put(name, {**figures, **mark, "failed": "ended before it had all"})

    figures = processes.section(name, limit_s, publish, settings.compilers)
    if is_new or "failed" not in figures:
        results.put(name, {**figures, **mark, "seconds": round(time.monotonic() - began, 1)})
    else:
        print(f"{name}: {figures['failed']}; the figures of an earlier run stay", flush=True)


def _train(part: str, order: Iterable[tuple[str, str]], results: Results, settings: Settings, left_s: Left) -> None:
    """Train models in ways, one after the other, and keep a row of each."""
    settings.cache.mkdir(parents=True, exist_ok=True)
    jobs = [_job(model, way, settings) for model, way in order]
    wanted = [job for job in jobs if not results.has(part, job.key)]
    for job in wanted:
        if job.key["way"] != "second":  # it is a first run
            remembered = settings.environ(job.key["way"], job.key["model"])["ACCEL_CACHE"]
            shutil.rmtree(remembered, ignore_errors=True)
    for ended in Queue(settings.lock, width=1 + AHEAD).run(wanted, left_s):
        _add(results, part, ended, row_of(Course(**ended.figures)) if "ends_s" in ended.figures else ended.figures)


def _job(model: str, way: str, settings: Settings) -> Job:
    own, is_accel = WAYS[way], way in ("reduced", "reordered", "second")
    run_s, settled_s = own.run_s * settings.pace, SETTLED_S * settings.pace
    most_s = MOST_SEARCH * run_s if is_accel else run_s
    length = f"--seconds={most_s}" if is_accel else f"--hold={run_s}"
    options = [f"--size={settings.size}", f"--lock={settings.lock}", length, f"--settled={settled_s}", *own.options]
    return Job(
        key={
            "model": model,
            "way": way,
            "variant": own.variant,
            "size": settings.size,
            "source": sources(*SUITE, *(LIBRARY if is_accel else ())),
        },
        arguments=["-m", "benchmarks.whole_process", model, own.variant, *options],
        expected_s=run_s + settled_s + own.start_s * settings.pace,
        limit_s=most_s + settled_s + MOST_START_S,
        environ=settings.environ("reduced" if way == "second" else way, model),
    )


def row_of(course: Course) -> Row:
    """Return what a process tells: its speed once it has settled, memory, losses, and what accel did."""
    first = course.losses[: min(len(course.losses), MOST_LOSSES) // LOSSES * LOSSES]
    no_matter = ("not applicable", "not allowed")
    return {
        "steps": len(course.ends_s),
        "seconds": course.ends_s[-1],
        "first_step_s": course.ends_s[0],
        "steps_per_s": course.settled_rate,
        "peak_mb": course.peak_mb,
        "settled_peak_mb": course.settled_peak_mb,
        "losses": [fmean(first[at : at + LOSSES]) for at in range(0, len(first), LOSSES)],
        "kept": course.kept,
        "strategies": [row for row in course.rows if row["status"] not in no_matter],
        "remembered": course.remembered,
        "search": course.state,
    }


def _add(results: Results, part: str, ended: Ended, figures: Row) -> None:
    """Take in a row and say so; what there was no time for is no row."""
    shown = [f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, float)]
    key = ended.job.key
    about = f"{key['model']}, {key.get('way', key['variant'])}"
    print(f"{about}: {figures.get('failed') or ', '.join(shown)} ({ended.seconds:.1f} s)", flush=True)
    if ended.is_whole:
        command = shlex.join(["python", *(each for each in ended.job.arguments if not each.startswith("--lock="))])
        row = {**key, "command": command, **figures, "device_s": round(ended.seconds, 1)}
        results.add(part, row, ("model", "way") if "way" in key else ("model", "variant"))


PARTS: dict[str, Callable[[Results, Settings, Left], None]] = {"prewarm": prewarm, "table": table, "second": second}


def run_part(name: str, results: Results, settings: Settings, limit_s: float) -> None:
    """Run a part within so many seconds."""
    began = time.monotonic()
    PARTS[name](results, settings, lambda: limit_s - (time.monotonic() - began))
    seconds = results.figures.get("seconds", {})
    results.put("seconds", {**seconds, name: round(time.monotonic() - began, 1)})


@click.command()
@click.argument("part", type=click.Choice(list(PARTS)))
@click.option("--out", type=click.Path(path_type=Path), help="[default: $OUT, or benchmarks/results on a GPU]")
@click.option("--limit-s", type=float, help="Seconds of the call.  [default: prewarm 170, table 380, second 190]")
@click.option("--size", default="full", show_default=True, type=click.Choice(["tiny", "full"]))
@click.option("--model", "models", multiple=True, type=click.Choice(sorted(ALL_MODELS)), help="Default: seven.")
@click.option("--pace", default=1.0, show_default=True, help="All times are multiplied by it.")
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, help="Folder that calls share.")
@click.option("--tests/--no-tests", default=True, help="Beside the compilers of prewarm.")
def main(part: str, out: Path | None, limit_s: float | None, models: tuple[str, ...], **options: Any) -> None:
    """Run a PART: prewarm, table or second."""
    if not torch.cuda.is_available() and options["size"] == "full":
        print("no CUDA device: nothing was run")
        sys.exit(2)
    settings = Settings(**{**options, "cache": options["cache"].resolve()}, models=models or MODELS)
    # Figures of a CPU are no record of a GPU.
    folder = out or Path(os.environ.get("OUT") or (FOLDER if torch.cuda.is_available() else settings.cache))
    results = Results.opened(f"python3 -m benchmarks.gpu.decisive {part}", folder, settings.cache)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as timeout(1) ends it
    code = 0
    try:
        run_part(part, results, settings, limit_s or LIMITS_S[part])
    except KeyboardInterrupt:
        print("ended by a signal")
        code = 1
    print(decisive_tables.text(results.figures))
    sys.exit(code)


if __name__ == "__main__":
    main()
