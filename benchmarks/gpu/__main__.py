import sys

from benchmarks.gpu.whole import main

if __name__ == "__main__":
    sys.exit(main())
