"""All faults, by name."""

from __future__ import annotations

from benchmarks.decisions import of_machine, of_numbers, of_search

FAULTS = {fault.name: fault for fault in (*of_search.FAULTS, *of_numbers.FAULTS, *of_machine.FAULTS)}
