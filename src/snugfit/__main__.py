"""`python -m snugfit`: the same command as `snugfit`."""

from snugfit.cli.main import main

if __name__ == "__main__":
    main()
