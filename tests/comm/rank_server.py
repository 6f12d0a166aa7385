"""What the server that ranks are forked from imports, so that no rank does.

Making a DDP module imports torch._dynamo, 1 s of CPU time for each rank, and what ranks run is in modules of tests.
"""

# ruff: noqa: F401

from __future__ import annotations

import os
from contextlib import suppress

# Before OpenMP is loaded: LAPACK in the threads of hooks would spin on all cores (three quarters of the CPU time of
# PowerSGD's ranks).
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import scipy.optimize
import torch._dynamo
import torch.utils.serialization

import accel.comm.bandwidth
import accel.comm.selector
import accel.dataio.passes.kept_samples
import accel.kernels.bernoulli
import accel.profiler.naming
import tests.accel.elastic.elastic_ranks
import tests.accel.elastic.scheduled_job
import tests.comm.cases
import tests.comm.test_bandwidth
import tests.comm.test_dgc
import tests.comm.test_fsdp
import tests.comm.test_local_sgd
import tests.comm.test_one_bit
import tests.comm.test_selector

with suppress(ImportError):  # torch 2.13 alone has it
    import torch.profiler._cupti_monitor
