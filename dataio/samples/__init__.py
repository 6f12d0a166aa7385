"""Samples that are kept: how one is laid out in bytes, and the memory that they lie in."""
