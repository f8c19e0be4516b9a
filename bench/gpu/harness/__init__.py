"""What every part of the kit uses: the driver, its NVML, shares, and results. Standard library only."""
