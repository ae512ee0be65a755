"""Pure: the weighted draw, which samples groups without replacement while groups come, go and change their weights.

Each group gets a key: the draw's time plus an exponentially distributed wait whose rate is the group's weight. The group with
the smallest key is sampled, and its key becomes the draw's time. Because exponential waits are memoryless, each choice is
proportional to the weights, and a change of weight only rescales the rest of the wait.
`scripts/prelude.lua` computes the same from the same bits. The keys are in the Redis key `lottery`, the time in `lottery_time`.
"""

from __future__ import annotations

import hashlib
import math


def draw(ticket: str, *, uses: int, weight: float, time: float) -> float:
    """Return a group's key. It is a function of ticket and `uses`, so that a repeated call draws the same."""
    digits = hashlib.sha1(f"{ticket}/{uses}".encode(), usedforsecurity=False).hexdigest()[:13]
    uniform = (int(digits, 16) + 1) / 4503599627370497
    return time - math.log(uniform) / weight


def rescaled(key: float, *, before: float, after: float, time: float) -> float:
    """Return the key of a group whose weight changes from `before` to `after`."""
    return time + (key - time) * before / after
