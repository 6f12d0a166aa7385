"""`make bench`: the benchmarks of this machine, one after the other; results go to benchmarks/results/.

python -m benchmarks.run [SUITE …] [--no-record]
"""

from __future__ import annotations

import subprocess
import sys

import click

SUITES: dict[str, tuple[str, ...]] = {
    "never_slower": ("never_slower", "--record"),
    "demo": ("demo", "--full", "--record"),
    "end_to_end": ("end_to_end", "--record"),
    "tuned_by_hand": ("end_to_end", "--variant", "by_hand", "--record"),
    "rivals": (
        "end_to_end",
        *(
            "--variant",
            "compile",
            "--variant",
            "autotune",
            "--variant",
            "accelerate",
            "--variant",
            "fabric",
            "--record",
        ),
    ),
    "time_to_accuracy": ("time_to_accuracy", "--record"),
    "scaling": ("scaling", "--record", "--plot", "docs/scaling.svg"),
    "noise_overhead": ("noise_overhead", "--record"),
    "fault_matrix": ("fault_matrix", "--record"),
    "decision_faults": ("decision_faults", "--record"),
    "simota": ("simota", "--record"),
    "fcos_targets": ("fcos_targets", "--record"),
    "optimizers": ("optimizers", "--record"),
    "muon": ("muon", "--record"),
    "launch_cost": ("launch_cost", "--record"),
    "bernoulli": ("bernoulli", "--record"),
    "length_balance": ("length_balance", "--record"),
    "recovery": ("recovery", "--record"),
    "resizing": ("resizing", "--record"),
    "loaders": ("loaders", "--record"),
    "jpeg": ("jpeg", "--record"),
    "comm_hooks": ("comm_hooks", "--record"),
    "comm_launches": ("comm_hooks", "--launches", "50", "--record"),
    "compressor_costs": ("compressor_costs", "--record"),
    "comm_choice": ("comm_choice", "--record"),
    "comm_accuracy": ("comm_accuracy", "--record"),
    "readme": ("readme",),
}
"""Name → module under benchmarks/, and its arguments: from --record on, what is written. The last one fills the pages
from the new results."""


@click.command()
@click.argument("suites", nargs=-1, type=click.Choice(list(SUITES)), metavar="[SUITE]…")
@click.option("--no-record", is_flag=True, help="Measure, and write nothing.")
def main(suites: tuple[str, ...], no_record: bool) -> None:
    """Run SUITES (default: all), each in a process of its own, and exit with 1 if one failed."""
    codes = []
    for name in suites or SUITES:
        module, *arguments = SUITES[name]
        if no_record and "--record" in arguments:
            arguments = arguments[: arguments.index("--record")]
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        codes.append(subprocess.run(command, check=False).returncode)
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
