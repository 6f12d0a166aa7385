"""A cluster that is simulated by measured profiles: how long jobs would take under a policy."""
