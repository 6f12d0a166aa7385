"""Parts of the goodput benchmarks: measured profiles, a rival's form, iterations at other batches."""
