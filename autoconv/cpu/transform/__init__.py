"""What Winograd and Fourier convolution share: tiles, and transforms of input, filters and output around a product."""
