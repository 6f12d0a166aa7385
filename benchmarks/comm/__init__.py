"""What the benchmarks of communication are made of: hosts on shaped links, ranks, and what they train."""
