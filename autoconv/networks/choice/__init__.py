"""Choosing for a whole network: a plan for every layer, under limits of each and of all together."""
