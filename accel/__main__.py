"""`python -m accel` is the `accel` command."""

from __future__ import annotations

from accel.commands.cli import main

if __name__ == "__main__":
    job = main.prepared(prog_name="accel")
    if job is not None:
        with job:  # here rather than in a function: the script's stack is hardly deeper than without the profiler
            exec(job.script.code(), job.script.globals)
        job.leave()
