"""Training scripts that others wrote: which, from where, and the data that they read."""
