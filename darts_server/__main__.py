import sys

from darts_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
