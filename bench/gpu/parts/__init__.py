"""The parts. A part is a module with `TITLE` and `run(machine)`, which yields rows; its docstring says what it shows. The rows
of SPECIFICATION.md that are pending on silicon name the part that settles them.

The plans are for machines that are lent for minutes: each takes less than nine of them, and begins with what blocks most."""

PLANS = [
    # Whether programs run in a share at all, and what they are charged.
    ["lookups", "closed", "runtime", "imports", "pytorch", "ways", "unseen", "tables", "sizes"],
    # GPU time.
    ["shares_alone", "shares_pair", "shares_four", "shares_graphs", "samples", "shares_short", "shares_long"],
    # The rest.
    [
        "frameworks",
        "growing",
        "pools",
        "local_memory",
        "calls",
        "namespaces",
        "faults",
        "compat",
        "driver_limits",
        "tools",
        "metrics",
        "host_memory",
    ],
]
ORDER = [part for plan in PLANS for part in plan]
# Minutes of a plan's parts.
PLAN_MINUTES = 8.5
