"""Measure and judge. The exit status is 0 where every limit was kept in one of three tries."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context

from .crowd import far_away, taking_turns
from .measure import Report
from .overhead import executions, slots
from .throughput import through_a_worker

TOPICS = {topic.__name__: topic for topic in (executions, slots, far_away, taking_turns, through_a_worker)}
TRIES = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=", ".join(TOPICS))
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    options = parser.parse_args()
    if unknown := set(options.topics) - set(TOPICS):
        parser.error(f"no topic {', '.join(unknown)}: they are {', '.join(TOPICS)}")
    measured = {}
    for name in options.topics or TOPICS:
        tries = measured[name] = tries_of(TOPICS[name])
        if not options.json:
            print(f"\n{TOPICS[name].__doc__}{f' (try {len(tries)})' if len(tries) > 1 else ''}")
            show(tries[-1])
    if options.json:
        print(json.dumps({name: [asdict(each) for each in tries] for name, tries in measured.items()}))
    return 0 if all(tries[-1].kept for tries in measured.values()) else 1


def tries_of(topic: Callable[[], Report]) -> list[Report]:
    """Measure until the limits are kept, each time in a new process."""
    tries: list[Report] = []
    while len(tries) < TRIES and not (tries and tries[-1].kept):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            tries.append(process.submit(topic).result())
    return tries


def show(report: Report) -> None:
    if report.costs:
        print(f"  {'microseconds':36}{'wall':>9}{'client CPU':>12}{'server CPU':>12}")
    for name, cost in report.costs.items():
        print(
            f"  {name:36}{cost.wall:9.0f}{cost.client:12.0f}{f'{cost.server:.0f}' if cost.server else '':>12}"
        )
    for ratio in report.ratios:
        limit = f"{'>=' if ratio.at_least else '<='} {ratio.limit:g}"
        aim = "" if ratio.aim is None else f"(aim {ratio.aim:g})"
        verdict = "kept" if ratio.kept else "MISSED"
        cpu = "" if ratio.cpu is None else f"of CPU time {ratio.cpu:.2f}"
        print(f"  {ratio.name:36}{ratio.value:9.2f}  {limit:8}{aim:10}{verdict:8}{cpu}".rstrip())
    if report.note:
        print(f"  {report.note}")


if __name__ == "__main__":
    sys.exit(main())
