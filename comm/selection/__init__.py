"""The scheme of each bucket, measured in training and switched between steps."""
