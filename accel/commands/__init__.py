"""The `accel` command and its sub-commands."""
