"""The CPU backend: kernels generated with LLVM, run on torch's threads."""
