"""`make bench`: the benchmarks of this machine, one after the other; results go to benchmarks/results/."""

from __future__ import annotations

import subprocess
import sys

SUITES = (
    ["benchmarks.never_slower", "--record"],
    ["benchmarks.demo", "--record"],
    ["benchmarks.profiler_overhead", "--record"],
    ["benchmarks.fault_matrix", "--record"],
    ["benchmarks.simota", "--record"],
    ["benchmarks.fcos_targets", "--record"],
    ["benchmarks.length_balance", "--record"],
    ["benchmarks.elastic_sampler", "--record"],
    ["benchmarks.loaders", "--record"],
    ["benchmarks.jpeg", "--record"],
    ["benchmarks.comm_hooks", "--record"],
    ["benchmarks.comm_hooks", "--launches", "50", "--record"],
    ["benchmarks.compressor_costs", "--record"],
    ["benchmarks.comm_choice", "--record"],
    ["benchmarks.comm_accuracy", "--record"],
    ["benchmarks.readme"],
)


def main() -> None:
    """Run each suite in a process of its own and exit with 1 if one failed."""
    codes = [subprocess.run([sys.executable, "-m", *suite], check=False).returncode for suite in SUITES]
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
