"""What ncu measured of each kernel, and what limits it: the column "because" of docs/gpu-notes.md.

    python benchmarks/ncu_table.py FILE    # of `ncu --csv --print-units base --log-file FILE`

`gpu.sh b` calls it.
"""

import argparse
import csv
from pathlib import Path

TIME, MEMORY = "gpu__time_duration.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
ISSUE = "sm__inst_issued.avg.pct_of_peak_sustained_active"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"
METRICS = (TIME, MEMORY, ISSUE, WARPS, REGISTERS)

Launch = dict[str, float]  # by metric


def read(path: Path) -> dict[tuple[str, str], Launch]:
    """(kernel, grid) of each launch. Lines of ncu's own, and of the program, are left out."""
    lines = path.read_text().splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    table = [line for line in lines[first:] if line.startswith('"')]
    launches: dict[tuple[str, str], Launch] = {}
    for row in csv.DictReader(table):
        launch = launches.setdefault((row["Kernel Name"], row["Grid Size"]), {})
        try:
            launch[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # a metric that this GPU does not have
            continue
    return launches


def because(launch: Launch) -> str:
    """The limit that the kernel is at; where it is at none, why it has too little in flight."""
    if launch[TIME] < 5000:
        return "short: the launch"
    if launch[MEMORY] >= 80:
        return "memory"
    if launch[ISSUE] >= 70:
        return "issue"
    if launch[WARPS] < 25:
        return f"few threads: {launch[REGISTERS]:.0f} registers, or few blocks"
    return "waits: latency or barriers"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    launches = read(parser.parse_args(arguments).file)
    whole = {of: launch for of, launch in launches.items() if launch.keys() >= set(METRICS)}
    print(f"{'us':>9}{'memory':>8}{'issue':>7}{'warps':>7}{'regs':>6}  because, kernel")
    for (kernel, grid), launch in sorted(whole.items(), key=lambda item: -item[1][TIME]):
        name = kernel.replace("memsave_ext::", "").replace("<unnamed>::", "")
        print(
            f"{launch[TIME] / 1e3:9.1f}{launch[MEMORY]:7.0f}%{launch[ISSUE]:6.0f}%"
            f"{launch[WARPS]:6.0f}%{launch[REGISTERS]:6.0f}  {because(launch)}: {name} {grid}"
        )
    if left := len(launches) - len(whole):
        print(f"{left} launches left out, of which ncu has not measured everything")
    return 0 if whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
