"""A running search: step events, switching and checking strategies, messages and the report."""
