"""What every part of the kit stands on: the driver, its NVML, shares, and results. Standard library only."""
