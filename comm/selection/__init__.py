"""Policies over the engine: plans, tried on real steps and changed between them."""
