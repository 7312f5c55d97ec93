"""`python -m hpc_cli`: the hpc command where its entry point is not on the path."""

from hpc_cli.app import main

if __name__ == "__main__":
    main()
