# SPDX-License-Identifier: Apache-2.0
"""The whole fault suite from the command line; see docs/fault-suite.md."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "kv")]

from faults import catalogue, engine, mutations, suite  # noqa: E402
from faults.lab import CPU, RUN_VARIABLE, Lab, newest_run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="which place each fault hits; random and printed if not given")
    parser.add_argument("--engine", action="store_true", help="also kill processes of the real CPU engine")
    parser.add_argument("--mutations", type=int, default=0, metavar="N", help="also N random mutations of a receipt")
    parser.add_argument("--docs", action="store_true", help="only write the generated pages of docs/")
    options = parser.parse_args()
    if options.docs:
        catalogue.write()
        return 0
    run = newest_run()
    if run is None:
        print(f"error: no receipt of {CPU} to break: make one, or name a run with {RUN_VARIABLE}", file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(1, 10**6) if options.seed is None else options.seed
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        lab = Lab(run, seed, Path(scratch))
        undetected = mutations.run(options.mutations, seed, lab.folder(), print) if options.mutations else 0
        faults = (*suite.FAULTS, *(engine.FAULTS if options.engine else ()))
        good = suite.run(faults, lab, lambda line: print(line, flush=True))
    return 0 if good and not undetected else 1


if __name__ == "__main__":
    sys.exit(main())
