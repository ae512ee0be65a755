"""Groups to packed bins: alignment to the predicting position, who is trained, what the step divides by."""

from dataclasses import replace

import numpy as np
import pytest

from async_rl.config.learner import TooLong
from async_rl.types import Failure, Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, VersionSpan
from learner.batches.batch import PackedBatch, pack_batch, shard_from_bytes, shard_to_bytes
from learner.batches.packed_rows import PackedRow
from learner.objective import Objective
from learner.packing.cost import Cost

PLAIN = Objective.model_validate({"advantages": {"baseline": "group_mean", "scale": "none"}})


def sample(ids: list[int], mask: list[int]) -> Sample:
    """Position i's log-probability is -i / 10, so that a shift by one shows."""
    sampled = [index for index, flag in enumerate(mask) if flag]
    return Sample(
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.uint8),
        logprobs=np.array([-index / 10 if flag else 0 for index, flag in enumerate(mask)], np.float32),
        versions=(VersionSpan(version=1, start=sampled[0], stop=sampled[-1] + 1),) if sampled else (),
    )


def rollout(*samples: Sample, reward: float = 0.0, status: Status = Status.OK) -> Rollout:
    failure = Failure(boundary="environment", kind="Broken", message="") if status is Status.FAILED else None
    return Rollout(samples=samples, reward=reward, status=status, failure=failure)


def taken(*rollouts: Rollout) -> TakenGroup:
    group = RolloutGroup(id="g", task=Task(key="t", environment="e", prompt="p"), rollouts=rollouts, worker="w")
    return TakenGroup(group=group, version_at_commit=2, version_at_take=3)


def sequences(batch: PackedBatch) -> list[dict[str, list[float]]]:
    """Every packed sequence on its own, in the order of its first token."""
    found = []
    for each in (each for bins in batch.minibatches[0].shards for each in bins):
        for start, stop in zip(each.cu_seqlens[:-1], each.cu_seqlens[1:], strict=True):
            names = ("token_ids", "positions", "targets", "mask", "behaviour", "advantages", "ages")
            found.append({name: getattr(each, name)[start:stop].tolist() for name in names})
    return sorted(found, key=lambda row: row["token_ids"][0])


def test_a_position_is_aligned_with_the_token_it_predicts() -> None:
    groups = [
        taken(
            rollout(sample([10, 11, 12, 13, 14], [0, 0, 1, 0, 1]), reward=3.0),
            rollout(sample([20, 21], [0, 1]), reward=1.0),
        )
    ]
    first, second = sequences(pack_batch(groups, objective=PLAIN, capacity=64))
    assert first["token_ids"] == [10, 11, 12, 13, 14]
    assert first["positions"] == [0, 1, 2, 3, 4]
    assert first["targets"][:-1] == [11, 12, 13, 14]
    assert first["mask"] == [0, 1, 0, 1, 0]
    assert first["behaviour"] == pytest.approx([0, -0.2, 0, -0.4, 0])
    assert first["advantages"] == [0, 1, 0, 1, 0]
    assert second["targets"][0] == 21
    assert second["mask"] == [1, 0]
    assert second["advantages"] == [-1, 0]


def test_a_first_token_cannot_be_trained_on() -> None:
    batch = pack_batch([taken(rollout(sample([5, 6], [1, 1]), reward=1.0), rollout(reward=0.0))], objective=PLAIN, capacity=8)
    [row] = sequences(batch)
    assert row["mask"] == [1, 0]
    assert batch.minibatches[0].counts.tokens == 1


def test_failed_rollouts_are_out_and_masked_ones_only_in_the_baseline() -> None:
    groups = [
        taken(
            rollout(sample([10, 11], [0, 1]), reward=1.0),
            rollout(sample([20, 21], [0, 1]), reward=4.0, status=Status.TRUNCATED),
            rollout(sample([30, 31], [0, 1]), reward=7.0, status=Status.MASKED),
            rollout(sample([40, 41], [0, 1]), reward=1e9, status=Status.FAILED),
        )
    ]
    batch = pack_batch(groups, objective=PLAIN, capacity=64)
    assert [(row["token_ids"][0], row["advantages"][0]) for row in sequences(batch)] == [(10, -3), (20, 0)]


def test_each_rollout_has_its_advantage_unless_it_is_not_trained_or_has_one_per_token() -> None:
    each = sample([1, 2, 3], [0, 1, 1])
    groups = [
        taken(rollout(each, reward=3.0), rollout(each, status=Status.FAILED), rollout(each, reward=1.0)),
        taken(rollout(each, reward=5.0), rollout(each, reward=5.0)),
    ]
    assert pack_batch(groups, objective=PLAIN, capacity=64).advantages == ((1.0, None, -1.0), (0.0, 0.0))
    per_token = Objective.model_validate({"advantages": {"type": "returns"}})
    assert pack_batch(groups, objective=per_token, capacity=64).advantages == ((), ())


def test_the_counts_are_those_of_the_whole_step() -> None:
    groups = [
        taken(rollout(sample([1, 2, 3], [0, 1, 1]), sample([4, 5], [0, 1])), rollout(sample([6, 7], [0, 0]))),
        taken(rollout(sample([8, 9], [0, 1]), status=Status.MASKED)),
        taken(rollout(sample([10, 11, 12, 13], [0, 1, 0, 1]))),
    ]
    batch = pack_batch(groups, objective=PLAIN, capacity=5, num_shards=2)
    assert (batch.minibatches[0].counts.tokens, batch.minibatches[0].counts.sequences) == (5, 3)
    assert batch.minibatches[0].counts.groups.tolist() == [0, 2]
    assert batch.minibatches[0].counts.group_tokens.tolist() == [3, 2]
    packed = [(each.group_ids.tolist(), each.mask.sum()) for bins in batch.minibatches[0].shards for each in bins]
    assert sum(int(trained) for _, trained in packed) == 5
    assert sorted(group for groups, _ in packed for group in groups) == [0, 0, 2]


def test_nothing_to_train_still_makes_a_bin_for_every_shard() -> None:
    batch = pack_batch([taken(rollout(status=Status.FAILED))], objective=PLAIN, capacity=8, num_shards=3)
    assert [len(bins) for bins in batch.minibatches[0].shards] == [1, 1, 1]
    assert batch.minibatches[0].counts.tokens == 0
    assert all(np.isfinite(value) for value in batch.metrics.values())


@pytest.mark.parametrize(
    ("too_long", "lengths", "trained", "advantages"),
    [
        ("truncate", [9, 12, 7], 2 + 8 + 11 + 3, {3: -4.25, 4: -3.25, 9: 1.75, 12: 5.75}),
        ("mask", [9, 7], 2 + 8 + 3, {3: -4.25, 4: -3.25, 9: 1.75}),
        ("drop", [9, 7], 2 + 8 + 3, {3: -7 / 3, 4: -4 / 3, 9: 11 / 3}),
    ],
)
def test_what_is_longer_than_a_row_has_one_of_its_own_and_what_the_model_has_no_positions_for_is_cut_masked_or_dropped(
    too_long: TooLong, lengths: list[int], trained: int, advantages: dict[int, float]
) -> None:
    rows = [sample(list(range(length)), [0] + [1] * (length - 1)) for length in (3, 9, 13, 4)]
    groups = [taken(*(rollout(row, reward=len(row)) for row in rows))]
    for _ in range(2):  # after a restart, the same groups are taken again
        batch = pack_batch(groups, objective=PLAIN, capacity=8, longest=12, too_long=too_long)
        (bins,) = batch.minibatches[0].shards
        assert sorted(len(each.token_ids) for each in bins) == sorted(lengths)
        assert batch.minibatches[0].counts.tokens == trained
        assert {len(row["token_ids"]): row["advantages"][0] for row in sequences(batch)} == pytest.approx(advantages)
        assert (batch.metrics["batch/oversize"], batch.metrics["batch/too_long"]) == (len(lengths) - 1, 1)


def test_an_answer_that_is_cut_counts_as_truncated_and_keeps_the_versions_of_what_is_left() -> None:
    objective = PLAIN.model_copy(update={"rewards": PLAIN.rewards.model_copy(update={"train_truncated": False})})
    row = sample(list(range(9)), [0, 0, 1, 1, 1, 1, 0, 1, 1])
    row = replace(row, versions=tuple(VersionSpan(version=v, start=a, stop=b) for v, a, b in ((0, 2, 4), (1, 4, 6), (2, 7, 9))))
    groups = [taken(rollout(row, reward=1.0), rollout(sample([50, 51], [0, 1])))]
    for trains, wanted in ((PLAIN, [[50], [0]]), (objective, [[50]])):
        found = sequences(pack_batch(groups, objective=trains, capacity=8, longest=5))
        assert sorted(each["token_ids"][:1] for each in found) == sorted(wanted)
    ages = {
        each["token_ids"][0]: each["ages"] for each in sequences(pack_batch(groups, objective=PLAIN, capacity=8, longest=5))
    }
    assert ages[0] == [0, 3, 3, 2, 0]


def test_a_step_of_which_nothing_is_left_is_still_a_step() -> None:
    groups = [taken(*(rollout(sample(list(range(9)), [0] + [1] * 8), reward=n) for n in range(2)))]
    batch = pack_batch(groups, objective=PLAIN, capacity=8, longest=4, too_long="drop", num_shards=2)
    assert ([len(bins) for bins in batch.minibatches[0].shards], batch.minibatches[0].counts.tokens) == ([1, 1], 0)
    assert all(np.isfinite(value) for value in batch.metrics.values())


def test_a_shard_survives_the_way_to_its_rank() -> None:
    groups = [taken(*(rollout(sample(list(range(n)), [0] + [1] * (n - 1)), reward=n) for n in (3, 9, 6, 2))) for _ in range(3)]
    batch = pack_batch(groups, objective=PLAIN, capacity=10, num_shards=2)
    for shard in range(2):
        [portion] = shard_from_bytes(shard_to_bytes(batch, shard))
        bins, counts = portion.rows, portion.counts
        assert (counts.tokens, counts.sequences) == (batch.minibatches[0].counts.tokens, batch.minibatches[0].counts.sequences)
        assert counts.group_tokens.tolist() == batch.minibatches[0].counts.group_tokens.tolist()
        for found, sent in zip(bins, batch.minibatches[0].shards[shard], strict=True):
            for name in PackedRow.__dataclass_fields__:
                np.testing.assert_array_equal(getattr(found, name), getattr(sent, name))
                assert getattr(found, name).dtype == getattr(sent, name).dtype


def test_rewards_and_ages_stand_where_their_tokens_are_predicted() -> None:
    row = Sample(
        token_ids=np.array([10, 11, 12, 13, 14, 15], np.int32),
        loss_mask=np.array([1, 0, 1, 1, 1, 0], np.uint8),
        logprobs=np.array([-1, 0, -1, -1, -1, 0], np.float32),
        versions=(
            VersionSpan(version=0, start=0, stop=1),
            VersionSpan(version=1, start=2, stop=4),
            VersionSpan(version=3, start=4, stop=5),
        ),
    )
    batch = pack_batch([taken(rollout(row, reward=0.5), rollout(reward=0.0))], objective=PLAIN, capacity=8)
    [[packed]] = batch.minibatches[0].shards
    assert packed.mask.tolist() == [0, 1, 1, 1, 0, 0]
    assert packed.ages.tolist() == [0, 2, 2, 0, 0, 0]
    assert packed.rewards.tolist() == [0, 0, 0, 0.5, 0, 0]


def test_room_is_left_for_what_ranks_that_share_a_row_add_to_sequences() -> None:
    groups = [taken(*(rollout(sample([1] * n, [0] + [1] * (n - 1)), reward=n) for n in (3, 5)))]
    assert pack_batch(groups, objective=PLAIN, capacity=8).metrics["batch/bins"] == 1
    batch = pack_batch(groups, objective=PLAIN, capacity=8, multiple=4)
    assert [len(each.token_ids) for each in batch.minibatches[0].shards[0]] == [5, 3]


def test_every_rank_gets_as_many_bins_as_interleaved_stages_want() -> None:
    groups = [taken(rollout(sample([1, 2, 3], [0, 1, 1]), reward=1.0), rollout(reward=0.0))]
    for batch in (
        pack_batch(groups, objective=PLAIN, capacity=8, num_shards=3, bins_multiple=2),
        pack_batch([taken(rollout(reward=0.0))], objective=PLAIN, capacity=8, num_shards=3, bins_multiple=2),
    ):
        assert [len(bins) for bins in batch.minibatches[0].shards] == [2, 2, 2]


def test_what_ranks_wait_for_each_other_is_a_metric() -> None:
    groups = [taken(*(rollout(sample([1] * n, [0] + [1] * (n - 1)), reward=n) for n in (2, 4, 6)))]
    batch = pack_batch(groups, objective=PLAIN, capacity=6, num_shards=2, cost=Cost(linear=1, quadratic=0))
    assert batch.metrics["batch/lock_step"] == 1
    batch = pack_batch(groups, objective=PLAIN, capacity=6, num_shards=2, cost=Cost(linear=0, quadratic=1))
    assert batch.metrics["batch/lock_step"] == 36 / ((36 + 16 + 4) / 2)
