"""Pure: weighted sampling without replacement, one group at a time, for a crowd that comes and goes.

A group's draw is a moment, exponentially distributed with its weight as the rate and counted from the lottery's time, which
is the last draw that won. Who has the earliest moment wins: that is exactly a choice in proportion to the weights, because an
exponential wait has no memory. For the same reason a change of weight only stretches what is left of the wait.
`scripts/prelude.lua` computes the same from the same bits.
"""

from __future__ import annotations

import hashlib
import math


def draw(ticket: str, *, uses: int, weight: float, time: float) -> float:
    digits = hashlib.sha1(f"{ticket}/{uses}".encode(), usedforsecurity=False).hexdigest()[:13]
    chance = (int(digits, 16) + 1) / 4503599627370497
    return time - math.log(chance) / weight


def stretched(moment: float, *, before: float, after: float, time: float) -> float:
    return time + (moment - time) * before / after
