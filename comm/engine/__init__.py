"""What carries a bucket of gradients to the wire and back, and owns what outlives a step."""
