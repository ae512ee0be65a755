"""A guessing game for an OpenEnv server. It runs in a Python of its own, which needs nothing of ours:

pip install -r examples/openenv/requirements.txt
uvicorn --app-dir examples/openenv --port 8123 server:app
"""

import random
from uuid import uuid4

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str


class GuessingGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **ignored) -> Hint:
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._secret = random.Random(seed).randint(1, 9)
        return Hint(hint="Guess a number from 1 to 9.")

    def step(self, action: Guess, **ignored) -> Hint:
        self._state.step_count += 1
        if not action.guess.strip().isdecimal():
            return Hint(hint="That is no number.")
        guess = int(action.guess)
        if guess == self._secret:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="higher" if guess < self._secret else "lower")

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(GuessingGame, Guess, Hint, max_concurrent_envs=16)
