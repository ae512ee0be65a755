"""Which versions are pushed, and requests about them."""
