"""What a way of averaging gradients costs on this network and machine, and which one is chosen."""
