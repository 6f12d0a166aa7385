"""What makes batches: in the loop, in threads, in worker processes."""
