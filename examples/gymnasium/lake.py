"""Gymnasium's frozen lake in words: the observation is where you stand, an action is a letter."""

from dataclasses import dataclass

from rollout_workers import Gymnasium, NoAction


@dataclass(kw_only=True)
class Lake(Gymnasium):
    id: str = "FrozenLake-v1"
    instructions: str = "Walk from the upper left to the lower right. Answer with l, d, r or u.\n"

    def tell(self, observation) -> str:
        row, column = divmod(int(observation), 4)
        return f"row {row}, column {column}"

    def read(self, text: str) -> int:
        letter = text.strip()[:1]
        if not letter or letter not in "ldru":
            raise NoAction("Answer with l, d, r or u.")
        return "ldru".index(letter)
