"""Modules that all parts of the kit use: the driver, its NVML, shares, and results. Standard library only."""
