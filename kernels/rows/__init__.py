"""What the ops that pick rows run on (`compact`, `gather_rows`, `threshold`): kernels, operators with gradients."""

BLOCK = 64
"""Elements of which `accel.kernels.threshold` takes the largest: 256 bytes, two of the 128 that a GPU reads at once."""
