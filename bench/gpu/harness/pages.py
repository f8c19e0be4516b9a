"""A share's two pages, as its node sees them, read through a process of the share: what explains a share's GPU time."""

import glob
import struct
import time

# Offsets: shim/core/src/cap.rs, shim/core/src/layout.rs and shim/core/src/compute/refill.rs.
SHARES = "/proc/{}/root/usr/lib/tranche/shares/*/"
CORES, TURN, COPIES = 24, 1024, (1024 + 64, 1024 + 128)
POSITION, SLOTS, SLOT = 384, 4096, 128
CHARGED = (1 << 48) - 1
MILLIONTHS = 1_000_000


def read(pid, name):
    """The bytes of a page; None if the process has no share or has ended."""
    try:
        for path in glob.glob(SHARES.format(pid) + name):
            with open(path, "rb") as page:
                return page.read()
    except OSError:
        pass
    return None


def compute(pid):
    """Milliseconds of debt (position beyond the grant), of carried debt and of spent time; the scale of prices and the rate. None
    before the first launch: what was granted until then has lapsed."""
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    cap, account = read(pid, "cap"), read(pid, "account")
    if not cap or not account:
        return None
    (turn,) = struct.unpack_from("<Q", cap, TURN)
    cores = 10_000 * struct.unpack_from("<I", cap, CORES)[0]
    since, base, rate, until, scale = struct.unpack_from("<5Q", cap, COPIES[turn % 2]) if turn else (0,) * 5
    position, spent, carried = struct.unpack_from("<3Q", account, POSITION)
    if not spent:
        return None
    whole = max(0, now - since)
    fast = min(whole, max(0, until - since))
    granted = base + fast * rate // MILLIONTHS + (whole - fast) * cores // MILLIONTHS
    return {
        "position": round((position - granted) / 1e6, 1),
        "carried": round(carried / 1e6, 1),
        "spent": round(spent / 1e6, 1),
        "scale": (scale or MILLIONTHS) / MILLIONTHS,
        "rate": (rate if now < until else cores) / MILLIONTHS,
    }


def charged(pid):
    """Bytes that a process is charged; None if it holds no slot."""
    account = read(pid, "account") or b""
    for at in range(SLOTS, len(account), SLOT):
        charge, _, owner = struct.unpack_from("<3Q", account, at + 16)
        if owner == pid:
            return charge & CHARGED
    return None
