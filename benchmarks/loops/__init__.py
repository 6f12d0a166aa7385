"""Small but realistic training loops, each written as a user would write it.

They are there to prove that `accel.optimize` never breaks, never slows and never changes training: run a loop once as
it is and once with `accel.optimize` for `wrap`, and compare the two outcomes.

    plain_run = run("cnn", steps=200)
    fast_run = run("cnn", steps=200, wrap=accel.optimize)

A loop is a generator: it trains, and yields `(loss, batch)` once per training step. `run` drives it and drops it after
the last step it wants, most often in the middle of an epoch, as a `break` would. A few loops hold a trap on purpose
(data that depends on how often the loader was iterated, two forward passes a step, batches held across steps); the
summary says which.
"""

from benchmarks.loops import images, sequences, vectors  # noqa: F401 (adds their loops to LOOPS)
from benchmarks.loops.suite import LOOPS, Job, Loop, Outcome, Steps, Wrap, checksum, plain, run

__all__ = ["LOOPS", "Job", "Loop", "Outcome", "Steps", "Wrap", "checksum", "plain", "run"]
