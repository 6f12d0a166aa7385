"""From what was seen to the causes that are named, in this order: evidence, rules, findings, verdict."""
