"""Check a demo's summary.json: the model learned, off-policy, within the staleness bound."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    summary = json.loads(Path(sys.argv[1]).read_text())
    claims = {
        "reward_last >= 0.9": summary["reward_last"] >= 0.9,
        "reward_last > reward_first": summary["reward_last"] > summary["reward_first"],
        "age_mean > 0": summary["age_mean"] > 0,
        "age_max <= max_age": summary["age_max"] <= summary["max_age"],
    }
    broken = [claim for claim, holds in claims.items() if not holds]
    if broken:
        sys.exit(f"the demo broke its promise: {'; '.join(broken)}\n{json.dumps(summary, indent=2)}")
    print(f"the demo kept its promise: {'; '.join(claims)}")


if __name__ == "__main__":
    main()
