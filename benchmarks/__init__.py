"""Benchmarks of accel: what they run, and the figures they give."""
