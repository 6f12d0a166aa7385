"""Whether what is switched on computes the same: before it runs for real, and while it runs."""
