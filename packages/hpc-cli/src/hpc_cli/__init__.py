"""The hpc command. The version of all five packages is the one of this package's metadata."""
