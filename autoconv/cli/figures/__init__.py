"""The verbs that draw."""
