"""One file or small folder per format; none knows another. The registry lists them."""
