"""From the findings and the experiments to the verdict that a report shows."""
