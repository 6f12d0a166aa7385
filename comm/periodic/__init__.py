"""Parts of local SGD."""
