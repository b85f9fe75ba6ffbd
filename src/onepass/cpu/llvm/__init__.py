"""Builders of LLVM IR that several kernels share."""
