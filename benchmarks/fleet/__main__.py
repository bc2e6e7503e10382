import sys

from benchmarks.fleet.bench import main

if __name__ == "__main__":
    sys.exit(main())
