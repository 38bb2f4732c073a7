"""What was measured: facts and races, limits and ranking, and the cache that keeps them."""
