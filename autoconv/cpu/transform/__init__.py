"""What Winograd and Fourier convolution share: tiles of a correlation, and the pipeline around their product."""
