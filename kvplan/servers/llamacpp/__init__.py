"""llama.cpp's server: what it allocates on each device and on the host, and what its `--fit` chooses."""
