"""What carries a bucket of gradients to the wire and back."""
