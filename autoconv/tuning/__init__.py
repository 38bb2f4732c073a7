"""Finding the best: candidates, their verification, the race, and the planner that chooses."""
