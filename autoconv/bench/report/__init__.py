"""Pages of figures: what is on record of a network's layers, and how its algorithms fare as extents grow."""
