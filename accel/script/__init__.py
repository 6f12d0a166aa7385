"""What an unmodified script trains, found while it runs, and handed to `accel.optimize`."""
