"""What the server that ranks are forked from imports, so that no rank does.

Making a DDP module imports torch._dynamo, 1 s of CPU time for each rank; and a process of multiprocessing imports the
main module, which is pytest's.
"""

# ruff: noqa: F401

from __future__ import annotations

import gc

import pytest
import torch._dynamo

import accel.comm.bandwidth
import accel.comm.selector
import tests.comm.cases

gc.freeze()  # or ranks look through all of torch as they collect garbage, and copy its pages
