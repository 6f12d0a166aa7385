"""What a dataset allows: shared handles, threads, draws, changes in place."""
