"""What a scheme costs on this network and machine, and which one is chosen."""
