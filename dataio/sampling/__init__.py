"""Arithmetic of the samplers: packs, deals, permutations; and the steps that are dealt."""
