"""What the families that multiply tiles share: numbers in parts, the products of these, and who may use the unit."""
