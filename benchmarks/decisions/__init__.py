"""Faults put into each decision of accel on purpose, and the tests that are to catch them."""
