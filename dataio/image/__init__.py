"""From image files to pixels in their place."""
