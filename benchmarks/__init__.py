"""Measurements for developers: `python -m benchmarks NAME`, from the root of the repository."""
