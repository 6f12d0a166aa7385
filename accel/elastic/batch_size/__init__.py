"""The batch size: a policy that knows numbers only, and a driver that follows the loop."""
