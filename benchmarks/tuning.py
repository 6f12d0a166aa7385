"""How soon parameters are found: `accel tune` beside plain Optuna and ASHA, with the same budget of core-seconds.

    python -m benchmarks.tuning [--seconds 28] [--slots 2] [--seeds 5] [--record]

Each has the same cores for the same time, the same sampler, seed and pruner, and the same job, which runs on one
thread (`benchmarks.tuning_job`). "Optuna, in process": each core has one process in which trials run one after
another, so that torch is imported once. "Optuna, scripts": each trial is a process of its own, as with accel. Compared
is when each came to the best loss that all of them have come to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from accel.cluster.job_table import ENDED, JobSpec, JobTable
from accel.cluster.local_actuator import LocalActuator
from accel.cluster.scheduler import Scheduler
from accel.cluster.tuning import ParameterTuner, SearchSpace
from accel.scores import CHECKPOINT, read_scores
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.tuning_job import LOG, train

RECORD = Record(
    "tuning",
    "how soon parameters are found with the same budget of core-seconds",
    {
        "seed": Column("of the sampler", "seed"),
        "way": Column("who tunes", "tuned by"),
        "core_s": Column("budget, core-seconds", "core-seconds", "{core_s:.0f}"),
        "trials": Column("begun", "trials"),
        "best": Column("lowest held-out loss of any epoch", "best loss", "{best:.4f}"),
        "reached_s": Column("until the best loss that all have come to, s", "all's best after", "{reached_s:.1f} s"),
    },
    key=("seed", "way"),
    head=f"{SOURCE}.",
)
_JOB = ("-m", "benchmarks.tuning_job")
_INTERVAL_S = 5.0


def space() -> SearchSpace:
    """Return what is tried."""
    from optuna.distributions import FloatDistribution, IntDistribution

    return SearchSpace(
        {
            "lr": FloatDistribution(1e-4, 1.0, log=True),
            "width": IntDistribution(4, 32),
            "decay": FloatDistribution(1e-6, 1e-2, log=True),
        },
        trials=10_000,
    )


def study(folder: Path, seed: int) -> Any:
    """Return a study like that of `accel tune`, which the processes of a run share."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        storage=f"sqlite:///{folder / 'study.sqlite'}",
        study_name="plain",
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=optuna.pruners.SuccessiveHalvingPruner(),
        load_if_exists=True,
    )


def in_process(folder: Path, seed: int, slots: int, until: float) -> int:
    """Let a process for each core run trials; return how many were begun."""
    study(folder, seed)
    code = f"from benchmarks.tuning import work; work({str(folder)!r}, {seed} + %d)"
    workers = [subprocess.Popen([sys.executable, "-c", code % number]) for number in range(slots)]
    time.sleep(max(until - time.time(), 0.0))
    for worker in workers:
        worker.kill()
        worker.wait()
    return len(study(folder, seed).trials)


def work(folder: str, seed: int) -> None:
    """Run trials in this process until it is killed."""
    import optuna

    def objective(trial: Any) -> float:
        def report(loss: float, epoch: int) -> None:
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

        chosen = {name: trial._suggest(name, each) for name, each in space().parameters.items()}
        return train(**chosen, report=report, with_accel=False)

    study(Path(folder), seed).optimize(objective)


def scripts(folder: Path, seed: int, slots: int, until: float) -> int:
    """Let each trial be a process; return how many were begun."""
    import optuna

    plain, running = study(folder, seed), list[tuple[Any, subprocess.Popen[bytes], Path]]()
    while time.time() < until:
        while len(running) < slots:
            trial = plain.ask(dict(space().parameters))
            own = folder / f"trial-{trial.number}"
            arguments = [f"--{name}={value}" for name, value in trial.params.items()]
            variables = {**os.environ, CHECKPOINT: str(own)}
            running.append((trial, subprocess.Popen([sys.executable, *_JOB, *arguments], env=variables), own))
        for trial, process, own in list(running):
            scores, known = read_scores(own), trial.study._storage.get_trial(trial._trial_id).intermediate_values
            for step in sorted(scores.keys() - known.keys()):
                trial.report(scores[step], step)
            is_over = process.poll() is not None
            if is_over and not process.returncode:
                plain.tell(trial, scores[max(scores)])
            elif is_over or (scores.keys() - known.keys() and trial.should_prune()):
                plain.tell(trial, state=optuna.trial.TrialState.FAIL if is_over else optuna.trial.TrialState.PRUNED)
            else:
                continue
            process.kill()
            process.wait()
            running.remove((trial, process, own))
        time.sleep(0.1)
    for _, process, _ in running:
        process.kill()
        process.wait()
    return len(plain.trials)


def by_accel(folder: Path, seed: int, slots: int, until: float) -> int:
    """Let trials be jobs of a cluster of this machine; return how many were begun."""
    table = JobTable(folder)
    spec = JobSpec(arguments=(*_JOB, "--accel"), folder=os.getcwd(), checkpoint=str(folder / "jobs"))
    scheduler = Scheduler(table, LocalActuator(slots), _INTERVAL_S)
    tuner = ParameterTuner(table, folder, space(), spec, "tuned", parallel=slots, seed=seed)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    while time.time() < until:
        tuner.look()
        time.sleep(0.1)
    table.cancel([row.name for row in table.jobs() if row.state not in ENDED])
    scheduler.stop()
    thread.join()
    return len(table.jobs())


WAYS: dict[str, Callable[[Path, int, int, float], int]] = {
    "Optuna, in process": in_process,
    "Optuna, scripts": scripts,
    "accel": by_accel,
}


def best_by_time(log: Path, until: float) -> list[tuple[float, float]]:
    """Return when each loss lower than all before was reached."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    best: list[tuple[float, float]] = []
    for line in sorted(lines, key=lambda each: float(each["at"])):
        if line["at"] <= until and line["loss"] < (best[-1][1] if best else float("inf")):
            best.append((line["at"], line["loss"]))
    return best


def rows(seed: int, slots: int, seconds: float) -> Iterator[Row]:
    """Yield a row for each way of tuning."""
    curves, begun, trials = {}, {}, {}
    for way, run in WAYS.items():
        with tempfile.TemporaryDirectory() as name:
            os.environ[LOG] = str(Path(name) / "log.jsonl")
            begun[way] = time.time()
            trials[way] = run(Path(name), seed, slots, begun[way] + seconds)
            curves[way] = best_by_time(Path(name) / "log.jsonl", begun[way] + seconds)
    common = max((curve[-1][1] if curve else float("inf")) for curve in curves.values())
    for way, curve in curves.items():
        reached = next((at - begun[way] for at, loss in curve if loss <= common), None)
        best = curve[-1][1] if curve else None
        yield {
            **{"seed": seed, "way": way, "core_s": slots * seconds},
            **{"trials": trials[way], "best": best, "reached_s": reached},
        }


@click.command()
@click.option("--seconds", default=28.0, show_default=True, help="For each way and seed.")
@click.option("--slots", default=2, show_default=True, type=click.IntRange(1))
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(seconds: float, slots: int, seeds: int, record: bool) -> None:
    """Tune in each way."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    console, found = Console(highlight=False, soft_wrap=True), list[Row]()
    for seed in range(seeds):
        for row in rows(seed, slots, seconds):
            found.append(row)
            console.print(row)
    if record:
        RECORD.write(found)


if __name__ == "__main__":
    main()
