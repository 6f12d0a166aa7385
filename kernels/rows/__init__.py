"""Triton kernels of the ops that pick rows: `compact`, `gather_rows`, `threshold`."""
