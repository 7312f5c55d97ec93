"""The hpc command."""
