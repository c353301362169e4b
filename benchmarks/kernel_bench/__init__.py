"""What benchmarks/kernels.py and benchmarks/tune_kernels.py share: problems with random data, and who solves them."""
