"""Parts that compressors are made of."""
