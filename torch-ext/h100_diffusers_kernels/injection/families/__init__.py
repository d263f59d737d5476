"""Models that run on the kernels in full, a file each."""
