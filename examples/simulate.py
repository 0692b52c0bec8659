"""How many replicas does a load need? Asked of the simulator: python examples/simulate.py

Virtual time over a hardware profile: nothing here is measured on that hardware.
"""

import argparse

from shared import slo
from sim.scenario import Scenario, run
from sim.workload import Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="a100-8b")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second, Poisson")
    parser.add_argument("--limit", default="e2e:4s", help="latency limit of every request")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--policies", nargs="+", default=["least_loaded", "collm"])
    options = parser.parse_args()

    work = Workload(rate=options.rate, limit=options.requests, slos=slo.parse([options.limit]))
    print(f"{options.rate:g} requests/s on {options.profile}, {options.limit} (simulated)")
    print(f"{'policy':>40}  replicas  in time   p99 s")
    for policy in options.policies:
        for replicas in (1, 2, 4, 8):
            scenario = Scenario(
                profile=options.profile, replicas=replicas, policy=policy, workload=work
            )
            found = run(scenario)
            print(
                f"{policy:>40}  {replicas:8}  {found['slo_attainment']:7.1%}  "
                f"{found['p99_e2el_ms'] / 1000:6.2f}"
            )


if __name__ == "__main__":
    main()
