"""A trained reward model as a reward: who asks over HTTP hears what the model says of each text alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from async_rl.config.loading import to_yaml
from async_rl.errors import ConfigError
from async_rl.megatron.model import forward_packed, pack
from async_rl.models.from_config import model_shape
from async_rl.protocols import Tokenizer
from async_rl.supervision import run_with
from async_rl.tokenization.rendering import PromptFormat, RenderedText, answered
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Message
from rollout_workers.agents import DatasetAgent
from rollout_workers.reward_model.__main__ import main
from rollout_workers.reward_model.client import ServedReward
from rollout_workers.reward_model.scorer import Scorer, checkpoint_of
from rollout_workers.reward_model.server import RewardServer, listening
from tests.scenarios.training.train_stage import config, run

ROW, CONTEXT = 40, 512


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    folder = tmp_path_factory.mktemp("runs") / "rm"
    made = config("rm", run={"name": "rm", "folder": str(folder.parent)}, learner={"steps": 2})
    run(made, folder)
    shape = model_shape(made.model, open_tokenizer(made.tokenizer).vocab_size)
    scorer = Scorer(made, shape, checkpoint_of(made, None))
    yield scorer
    scorer.close()


class Served:
    """The server, and how many texts it scored at once."""

    def __init__(self, scorer: Scorer) -> None:
        self.together: list[int] = []
        self._scorer = scorer
        self.tokenizer = open_tokenizer(config("rm").tokenizer)
        self.server = RewardServer(self._score, self.tokenizer, PromptFormat(), row_tokens=ROW, context_tokens=CONTEXT)

    async def _score(self, texts: Sequence[RenderedText]) -> list[float]:
        self.together.append(len(texts))
        assert sum(map(len, texts)) <= ROW
        await asyncio.sleep(0)  # others may ask meanwhile
        return self._scorer.scores(texts)


def alone(scorer: Scorer, tokenizer: Tokenizer, prompt: str, response: str) -> float:
    ids = torch.tensor(answered(tokenizer, prompt, response).token_ids)
    return forward_packed(scorer._model, *pack([ids])).values()[-1].item()


async def test_many_ask_at_once_and_each_hears_its_own(trained: Scorer, tmp_path: Path) -> None:
    served = Served(trained)
    asked = [(f"{number % 10}=", "1234567890"[: 1 + number % 9]) for number in range(24)]
    table = tmp_path / "table.jsonl"
    table.write_text(json.dumps({"prompt": "3=", "answer": ""}) + "\n")

    async def ask() -> None:
        async with listening(served.server, host="127.0.0.1", port=0) as url:
            reward = ServedReward(url)
            found = await asyncio.gather(*(reward.score(*each) for each in asked))
            assert found == pytest.approx([alone(trained, served.tokenizer, *each) for each in asked], abs=1e-5)
            assert len(set(found)) > 10
            assert sum(served.together) == 24
            assert max(served.together) > 1  # they went together

            agent = DatasetAgent(name="d", path=str(table), scoring=url)
            assert await agent.reward(agent.task(0), "45") == pytest.approx(
                alone(trained, served.tokenizer, "3=", "45"), abs=1e-5
            )

            said = [Message(role="user", content="3")]
            assert await reward.score(said, [Message(role="assistant", content="4")]) == await reward.score(said, "4")
            with pytest.raises(ValueError, match="refused: the text has 44 tokens, and at most 40 fit"):
                await reward.score("3=", "4" * 40)

        (tmp_path / "token").write_text("known\n")
        async with listening(served.server, host="127.0.0.1", port=0, token="known") as url:
            with pytest.raises(ValueError, match="does not know this token"):
                await ServedReward(url).score("3=", "4")
            await ServedReward(f"{url}#token_file={tmp_path / 'token'}").score("3=", "4")

    await run_with(ask, scoring=served.server.serve)


def test_beyond_this_machine_it_wants_a_token_or_a_word(tmp_path: Path) -> None:
    folder = tmp_path / "config.yaml"
    folder.write_text(to_yaml(config("rm", run={"name": "none", "folder": str(tmp_path)})))
    with pytest.raises(ConfigError, match=r"unauthenticated requests on 0\.0\.0\.0: give --token-file, or --insecure"):
        main(["@", str(folder), "--host", "0.0.0.0"])
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        main(["@", str(folder), "--host", "0.0.0.0", "--insecure"])


def test_a_run_without_a_checkpoint_has_nothing_to_serve(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        checkpoint_of(config("rm", run={"name": "none", "folder": str(tmp_path)}), None)
