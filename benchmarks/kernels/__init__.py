"""What the benchmarks of kernels are made of: the variants that are compiled, and rivals."""
