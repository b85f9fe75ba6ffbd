"""The GPU backend: Triton kernels, one file an op, and the device functions they share."""
