"""`hpc bench`: timed runs that print what a person would feel, and the command that measured it."""
