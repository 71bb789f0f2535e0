"""`python -m pgpreemptcheck`."""

from pgpreemptcheck.cli import main

if __name__ == "__main__":
    main()
