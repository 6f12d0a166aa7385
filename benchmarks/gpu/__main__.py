"""`make gpu`, also `python -m benchmarks.gpu`."""

from benchmarks.gpu.suite import main

main()
