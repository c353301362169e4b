"""Times of single kernels: measured on some GPUs, carried to others by what their memory and arithmetic allow."""
