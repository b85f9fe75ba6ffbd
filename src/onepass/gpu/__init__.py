"""The GPU backend: the Triton kernels of each op and the device functions they share."""
