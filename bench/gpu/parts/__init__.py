"""The parts, in the order in which they run. A part is a module with `TITLE` and `run(machine)`, which yields rows."""

ORDER = [
    "lookups",
    "frameworks",
    "sizes",
    "samples",
    "shares_alone",
    "shares_pair",
    "shares_four",
    "shares_graphs",
    "growing",
    "local_memory",
    "pools",
    "faults",
    "compat",
    "runtime",
    "tools",
    "calls",
    "ways",
    "metrics",
    "closed",
]
