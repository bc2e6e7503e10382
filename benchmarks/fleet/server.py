"""A server whose engines are scripted: ``python -m benchmarks.fleet.server ENGINES RATE MEAN PORT``."""

import sys

from benchmarks.fleet.bench import ARGV, CANDIDATES, GROUP_SIZE, SLOTS, ScriptedPlaces
from darts_server import app, cli
from darts_server.vllm.api import launch


def main() -> int:
    engines, rate, mean, port = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    places = ScriptedPlaces(rate, mean, echo=True)
    fleet = ARGV, engines, places.place, "127.0.0.1", 0.0
    app._start_engines = lambda settings, args, vllm_argv: launch.start_fleet(args, *fleet)
    shaping = ["--policy", "uniform", "--redundancy", str(CANDIDATES / GROUP_SIZE)]
    return cli.main(["serve", *ARGV, "--max-num-seqs", str(SLOTS), "--host", "127.0.0.1", "--port", port, *shaping])


if __name__ == "__main__":
    sys.exit(main())
