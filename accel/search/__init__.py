"""The search: what to try next and what it may cost. It decides, and never touches the run."""
