"""What is done to the sums of a layer before they are stored: activations, and the scales of quantised layers."""
