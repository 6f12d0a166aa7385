"""Parts of the block codes: the layout of the bytes, and the Triton kernels."""
