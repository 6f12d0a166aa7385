"""From evidence to named causes, in this order: evidence, anatomy, rules, findings."""
