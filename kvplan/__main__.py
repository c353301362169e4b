"""`python -m kvplan` is the command `kvplan`."""

from kvplan.cli.main import run

if __name__ == "__main__":
    run()
