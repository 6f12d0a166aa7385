"""Block codes: what is common to encodings with one scale per block, their checks, and their Triton kernels."""
