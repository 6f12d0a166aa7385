"""The GPU suite: what `make gpu` runs, how a device is timed, and what the figures are held to."""
