import sys

from benchmarks.gpu.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
