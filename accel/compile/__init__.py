"""What the strategy torch_compile is made of: which calls are compiled, which blocks share a graph, its draws."""
