"""Arithmetic of the samplers: packs, deals, permutations."""
