"""What the benchmarks of loading are made of: data, jobs and other libraries' loaders."""
