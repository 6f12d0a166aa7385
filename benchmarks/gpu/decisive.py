"""What the one line gives on a GPU, beside what an expert gets by hand: three calls that fit 15 minutes together.

    python3 -m benchmarks.gpu.decisive prewarm | table | second [--out FOLDER] [--limit-s SECONDS]

docs/gpu.md says what they do. Each writes its figures after each row, prints the table last, and leaves out what is
measured on this machine already. Processes of `table` and `second` run one after the other, and import and make their
data while another is timed. `--size tiny` runs on a CPU, too.
"""

from __future__ import annotations

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
from benchmarks.gpu.results import Results, sources
from benchmarks.gpu.sections import LIBRARY, SECTIONS
from benchmarks.record import DATA, FOLDER
from benchmarks.render import Row
from benchmarks.suite import MODELS as ALL_MODELS
from benchmarks.variants import BY_HAND
from benchmarks.variants.recipes import ON_A_GPU
from benchmarks.whole_process import Course

CACHE = DATA / "decisive"
"""Kept from call to call on a machine, where the folder of the results may be emptied."""
MODELS = ("resnet", "swin", "bert", "gpt", "yolox", "vit", "unet")
FIRST_MODELS = 5
"""The others while there is time left."""
STEP_GB = {"resnet": 8, "swin": 12, "bert": 20, "gpt": 26, "yolox": 10, "vit": 8, "unet": 36}
"""Most memory of a compiled step in float32, by reckoning; BERT's plain one was measured, 17.6."""
TESTS_GB = 10.0
REPEATED = ("swin", "bert", "gpt", "vit")
"""Models of whose blocks accel compiles one for all."""
COMPILE_PLANS = ("planned: torch_compile=whole model", "planned: torch_compile=blocks")
COMPILE_PLAN_S = 60.0
"""Of a process with such a plan, which is switched on after some steps."""
SUITE = ("benchmarks/suite", "benchmarks/variants", "benchmarks/whole_process.py")
"""What all rows depend on."""
AUTOTUNED = f"{BY_HAND}{', '.join(ON_A_GPU)}"
COMPILED = AUTOTUNED.replace("autotuned", "compile")
"""By hand where `prewarm` did not end autotuning: it would be done on the device's time."""
AHEAD = 3
"""Processes that prepare themselves while another is timed."""
LOSSES = 10
"""Steps whose mean loss is kept, of the first `MOST_LOSSES` steps."""
MOST_LOSSES = 400
LIMITS_S = {"prewarm": 170, "table": 380, "second": 190}
"""Of the calls; with the start of a machine and transfers they fit 15 minutes."""


class Way(NamedTuple):
    """How a model is trained."""

    variant: str
    """Of benchmarks/variants."""
    run_s: float
    """After the third step; under accel of the whole run."""
    options: tuple[str, ...] = ()
    """More of them for the process."""
    start_s: float = 5.0
    """Expected before the third step: the device's start, kernels loaded, what was compiled loaded."""


WAYS = {
    "plain": Way("plain", 5.0),
    "by hand": Way(AUTOTUNED, 6.0, start_s=15.0),
    "reduced": Way("reduced", 34.0, ("--budget=25s",)),
    "TF32": Way(f"{BY_HAND}tf32", 4.0),
    "compile": Way("compile", 5.0, start_s=15.0),
    "plain, another seed": Way("plain", 4.0, ("--seed=1",)),
    "reordered": Way("reordered", 15.0, ("--budget=25s",)),
    "second": Way("reduced", 10.0),
}
FIRST, REST = ("plain", "by hand", "reduced"), ("TF32", "compile", "plain, another seed")
MOST_START_S = 60.0
"""Beyond its time a process may take so long to start: what was not compiled before is compiled then."""
WARM_GRAPHS = "graphs: "
_WARM_GRAPHS = """
from benchmarks.gpu.swin_graphs import trainer
trainer({way!r}).losses(4)
print("{{}}")
"""


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

    def environ(self, *accel: str) -> dict[str, str]:
        """Return the variables that name the cache folders; `accel` is the part that holds what accel remembers."""
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
            "ACCEL_CACHE": str(self.cache.joinpath("accel", *accel)),
        }


Left = Callable[[], float]
"""Returns the seconds that are left."""


def prewarm(results: Results, settings: Settings, left_s: Left) -> None:
    """Measure the device's ceilings, fill the compilers' cache, and run the tests beside."""
    if not results.is_known("ceilings"):
        run_section("ceilings", results, min(SECTIONS["ceilings"].limit_s, left_s()))
    jobs = list(_compilations(results, settings, left_s))
    mark = sources(*LIBRARY, "tests")
    tests = results.figures.get("tests", {})
    if settings.tests and not (tests.get("green") and tests.get("sources") == mark):
        jobs.insert(0, processes.gpu_tests(left_s(), TESTS_GB))
    gb = torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else 64.0
    for ended in Queue(width=max(2, usable_cores() // 2), gb=0.9 * gb).run(jobs, left_s):
        if "tests" in ended.job.key:
            results.put("tests", {"green": False, "line": "", **ended.figures, "sources": mark})
        else:
            _add(results, "compiling", ended, compiled_row(ended.figures))


def _compilations(results: Results, settings: Settings, left_s: Left) -> Iterator[Job]:
    """Yield what is to be compiled, in the order in which it is worth the time."""
    first, more = settings.models[:FIRST_MODELS], settings.models[FIRST_MODELS:]
    kinds = [*product(first, (COMPILED, "compile")), *product(first, [AUTOTUNED])]
    if torch.cuda.is_available() and "swin" in first:
        kinds += [("swin", WARM_GRAPHS + way) for way in ("compile", "both, captured", "reduce-overhead")]
    kinds += [(model, COMPILE_PLANS[model in REPEATED]) for model in first]
    kinds += product(more, [COMPILED])
    environ = {**settings.environ("compiling"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    for number, (model, variant) in enumerate(kinds):
        key = {"model": model, "variant": variant, "size": settings.size, "source": sources(*SUITE, *LIBRARY)}
        if variant.startswith(WARM_GRAPHS):
            arguments = ["-c", _WARM_GRAPHS.format(way=variant.removeprefix(WARM_GRAPHS))]
        else:
            own = settings.cache / f"compiling-{number}.lock"  # held by nobody else: they run together
            times = ["--hold=0.1", f"--seconds={COMPILE_PLAN_S * settings.pace}", f"--lock={own}"]
            arguments = ["-m", "benchmarks.whole_process", model, variant, f"--size={settings.size}", *times]
        if not results.has("compiling", key):
            gb = STEP_GB.get(model, 8) * (0.6 if variant.startswith(BY_HAND) else 1.0)  # in bfloat16
            yield Job(key, arguments, 0.0, left_s(), gb, environ)


def compiled_row(figures: Row) -> Row:
    """Return what the steps took beyond the shortest, which is what compiling took, s; and what became of a plan."""
    if "ends_s" not in figures:
        return figures
    ends_s = [0.0, *figures["ends_s"]]
    steps_s = [after - before for before, after in pairwise(ends_s)]
    least_s = min(steps_s)
    row = {"compile_s": sum(steps_s) - least_s * len(steps_s), "step_ms": 1e3 * least_s}
    plan = [each for each in figures["rows"] if each["name"] == "torch_compile"]
    return {**row, **({"status": plan[0]["status"], "why": plan[0]["why"]} if plan else {})}


def table(results: Results, settings: Settings, left_s: Left) -> None:
    """Train each model in each way."""
    first, more = settings.models[:FIRST_MODELS], settings.models[FIRST_MODELS:]
    order = [*product(first, FIRST), *product(first, REST), *product(first[:3], ["reordered"]), *product(more, FIRST)]
    _train("table", order, results, settings, left_s)


def second(results: Results, settings: Settings, left_s: Left) -> None:
    """Train each model with what accel remembers; then race what a first table leaves open."""
    _train("second", product(settings.models[:FIRST_MODELS], ["second"]), results, settings, left_s)
    for name in decisive_tables.RACES:
        if not results.is_known(name) and left_s() > 0 and (name == "overhead" or torch.cuda.is_available()):
            run_section(name, results, min(SECTIONS[name].limit_s * settings.pace, left_s()))


def run_section(name: str, results: Results, limit_s: float) -> None:
    """Run a section for so long at most, its figures on disk as they come."""
    print(f"== {name}", flush=True)
    mark = {"sources": sources(*SECTIONS[name].sources)}
    began = time.monotonic()
    figures = processes.section(name, limit_s, lambda figures: results.put(name, {**figures, **mark}))
    results.put(name, {**figures, **mark, "seconds": round(time.monotonic() - began, 1)})


def _train(part: str, order: Iterable[tuple[str, str]], results: Results, settings: Settings, left_s: Left) -> None:
    """Train models in ways, one after the other, and keep a row of each."""
    lock = settings.cache / "device.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    jobs = [_job(model, way, results, settings, lock) for model, way in order]
    wanted = [job for job in jobs if not results.has(part, job.key)]
    for job in wanted:
        if job.key["way"] != "second":  # it is a first run
            remembered = settings.environ(job.key["way"], job.key["model"])["ACCEL_CACHE"]
            shutil.rmtree(remembered, ignore_errors=True)
    for ended in Queue(lock, width=1 + AHEAD).run(wanted, left_s):
        _add(results, part, ended, row_of(Course(**ended.figures)) if "ends_s" in ended.figures else ended.figures)


def _job(model: str, way: str, results: Results, settings: Settings, lock: Path) -> Job:
    own, is_accel = WAYS[way], way in ("reduced", "reordered", "second")
    variant = own.variant
    if variant == AUTOTUNED and not results.has("compiling", {"model": model, "variant": AUTOTUNED}):
        variant = COMPILED
    run_s = own.run_s * settings.pace
    length = f"--seconds={run_s}" if is_accel else f"--hold={run_s}"
    options = [f"--size={settings.size}", f"--lock={lock}", length, *own.options]
    return Job(
        key={
            "model": model,
            "way": way,
            "variant": variant,
            "size": settings.size,
            "source": sources(*SUITE, *(LIBRARY if is_accel else ())),
        },
        arguments=["-m", "benchmarks.whole_process", model, variant, *options],
        expected_s=run_s + own.start_s * settings.pace,
        limit_s=run_s + MOST_START_S,
        environ=settings.environ("reduced" if way == "second" else way, model),
    )


def row_of(course: Course) -> Row:
    """Return what a process tells: its speed over the last 60 % of its time and at its end, memory, losses."""
    first = course.losses[: min(len(course.losses), MOST_LOSSES) // LOSSES * LOSSES]
    no_matter = ("not applicable", "not allowed")
    return {
        "steps": len(course.ends_s),
        "seconds": course.ends_s[-1],
        "first_step_s": course.ends_s[0],
        "steps_per_s": course.last_rate(0.6),
        "end_steps_per_s": course.last_rate(0.2),
        "peak_mb": course.peak_mb,
        "held_peak_mb": course.held_peak_mb,
        "losses": [fmean(first[at : at + LOSSES]) for at in range(0, len(first), LOSSES)],
        "kept": course.kept,
        "strategies": [row for row in course.rows if row["status"] not in no_matter],
        "remembered": course.remembered,
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
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of the results.")
@click.option("--limit-s", type=float, help="Seconds of the call.  [default: prewarm 170, table 380, second 190]")
@click.option("--size", default="full", show_default=True, type=click.Choice(["tiny", "full"]))
@click.option("--model", "models", multiple=True, type=click.Choice(sorted(ALL_MODELS)), help="Default: seven.")
@click.option("--pace", default=1.0, show_default=True, help="All times are multiplied by it.")
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, help="Folder that calls share.")
@click.option("--tests/--no-tests", default=True, help="Beside the compilers of prewarm.")
def main(part: str, out: Path, limit_s: float | None, models: tuple[str, ...], **options: Any) -> None:
    """Run a PART: prewarm, table or second."""
    if not torch.cuda.is_available() and options["size"] == "full":
        print("no CUDA device: nothing was run")
        sys.exit(2)
    settings = Settings(**{**options, "cache": options["cache"].resolve()}, models=models or MODELS)
    results = Results.opened(f"python3 -m benchmarks.gpu.decisive {part}", out, settings.cache)
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
