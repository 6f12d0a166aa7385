"""The C source of the random draws, and its compilation."""
