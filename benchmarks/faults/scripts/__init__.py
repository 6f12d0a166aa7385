"""Training scripts with one injected fault each, and healthy controls: what `accel profile` is judged on."""
