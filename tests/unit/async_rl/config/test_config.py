"""What the tree derives from itself."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from async_rl.config import Config, WireConfig


def config(**sections: object) -> Config:
    size = {"hidden": 32, "layers": 1, "heads": 2}
    tree = {"model": {"size": size}, "environments": [{"type": "counting"}], "batch": {"groups_per_step": 8}}
    return Config.model_validate(tree | sections)


def test_slots_are_what_the_age_bound_allows():
    made = config(staleness={"max_age": 3}, batch={"groups_per_step": 8})
    assert made.limits.slots == 32
    assert config(staleness={"max_age": 0}, batch={"groups_per_step": 8}).limits.slots == 8


def test_a_fraction_of_an_age_is_a_fraction_of_the_slots():
    made = config(staleness={"max_age": 0.5}, batch={"groups_per_step": 8})
    assert (made.limits.slots, made.limits.age_bound) == (12, 1)


def test_the_window_of_samples_per_insert_is_reverbs():
    replay = {"max_uses": 2, "samples_per_insert": 2, "min_groups": 5, "error_buffer": 6}
    limits = config(replay=replay).limits
    assert (limits.min_diff, limits.max_diff) == (4, 16)
    assert config(replay=replay | {"error_buffer": None}).limits.error_buffer == 16


def test_an_archive_gets_time_to_write():
    assert config(retention={"keep_steps": 3}).limits.keep_steps == 3
    assert config(retention={"archive": True}, learner={"checkpoint_every": 10}).limits.keep_steps == 40


def test_shares_are_whole_groups_of_a_batch():
    environments = [{"type": "counting", "max_share": 0.3}, {"type": "even_digits"}]
    assert config(environments=environments).limits.quotas == {"counting": 3}


def test_fleets_agree_by_what_a_folder_says_and_not_by_where_it_lies(tmp_path: Path):
    facts: list[dict[str, str]] = []
    for place, text in (("here", "{}"), ("there", "{}"), ("other", '{"hidden_size": 1}')):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(text)
        facts.append(config(model={"folder": str(tmp_path / place)}).fleet_facts)
    here, there, other = facts
    assert here == there
    assert {key for key in here if here[key] != other[key]} == {"model.folder"}


def test_fleets_share_the_longest_sequence():
    size = {"hidden": 32, "layers": 1, "heads": 2}
    before, after = (config(model={"size": size, **given}).fleet_facts for given in ({}, {"max_sequence": 100}))
    assert [key for key, value in before.items() if after[key] != value] == ["model.max_sequence"]


def test_facts_name_each_value_that_fleets_share():
    changed = config(model={"size": {"hidden": 64, "layers": 1, "heads": 2}}).fleet_facts
    assert [key for key, value in config().fleet_facts.items() if changed[key] != value] == ["model.size.hidden"]


def test_the_socket_of_an_embedded_server_fits_the_systems_limit(tmp_path: Path):
    deep = config(run={"name": "r" * 100, "folder": str(tmp_path / ("f" * 60))})
    assert len(deep.redis_url.removeprefix("unix://")) < 100
    assert deep.redis_url != config(run={"name": "other", "folder": str(tmp_path)}).redis_url


@pytest.mark.parametrize(
    ("wire", "complaint"),
    [
        ({"host": "0.0.0.0"}, "means every interface of this machine"),
        ({"host": "::", "insecure": True}, "means every interface of this machine"),
        ({"host": "10.1.2.3"}, "if it is, set wire.insecure: true"),
        ({"host": "head"}, "if it is, set wire.insecure: true"),
    ],
)
def test_an_address_that_everybody_reaches_is_refused(wire: dict[str, object], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        WireConfig.model_validate(wire)
    assert WireConfig(host="10.1.2.3", insecure=True).host == "10.1.2.3"
    assert [WireConfig(host=host).insecure for host in ("127.0.0.1", "::1", "localhost")] == [False] * 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"environments": [{"type": "counting"}, {"type": "counting"}]}, "different names"),
        ({"leases": {"learner_s": 1.0}}, "two heartbeats"),
        ({"model": {"size": {"hidden": 30, "layers": 1, "heads": 4}}}, "multiple of heads"),
        ({"model": {}}, "exactly one"),
        ({"learner": {"parallel": {"tensor": 2, "processes": 3}}}, "multiple of tensor x pipeline"),
        ({"replay": {"max_uses": 4}, "staleness": {"max_age": 2}}, "in at most 3 steps"),
        ({"replay": {"max_uses": 2, "samples_per_insert": 3}}, "above replay.max_uses"),
        ({"replay": {"max_uses": 2, "samples_per_insert": 2, "error_buffer": 2}}, "would wait for each other"),
        ({"replay": {"samples_per_insert": 1, "min_groups": 99}}, "above the buffer's 24 slots"),
        ({"environments": [{"type": "counting", "max_share": 0.4}]}, "raise one of them"),
        ({"staleness": {"selector": "newest"}}, "windowed_fifo"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(wrong: dict[str, object], says: str):
    with pytest.raises(ValidationError, match=says):
        config(**wrong)


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"batch": {"groups_per_step": 2, "minibatches": 3}}, r"minibatches \(3\) must not exceed groups_per_step \(2\)"),
        ({"learner": {"optimizer": {"betas": [0.9, 1.0]}}}, "should be less than 1"),
        ({"learner": {"optimizer": {"learning_rate": float("inf")}}}, "should be a finite number"),
    ],
)
def test_what_no_optimizer_can_do_is_refused(sections: dict[str, object], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        config(**sections)


@pytest.mark.parametrize("name", [".", "..", "-rf", ".hidden", "a/b", "a\n", "a\0", "a b", "ü"])
def test_a_run_is_called_by_what_is_safe_as_a_folder_and_a_key(name: str):
    with pytest.raises(ValidationError, match=r"run\.name \(.*\) is used as a folder name and in Redis keys"):
        config(run={"name": name})


@pytest.mark.parametrize("name", ["", "shapes", "a.b-c_1", "007", "_x"])
def test_ordinary_names_are_names(name: str):
    assert config(run={"name": name}).run.name == name


@pytest.mark.parametrize(
    "url", ["redis://me:secret@h:6379/0", "rediss://:secret@h", "unix:///s?password=secret", "redis+cluster://:secret@a,b"]
)
def test_a_password_in_the_address_of_redis_is_refused(url: str):
    with pytest.raises(ValidationError, match=r"put it into a file named by redis\.password_file"):
        config(redis={"url": url})


def test_sentinels_and_users_stand_in_the_address():
    for url in ("redis+sentinel://:secret@a,b/main", "redis://me@h:6379/0", "unix:///a:b/redis.sock"):
        assert config(redis={"url": url}).redis.url == url
