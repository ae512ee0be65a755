"""The command line as a person meets it: what is printed, and with which code it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import async_rl
from async_rl.cli.main import VERBS, dispatch
from async_rl.cli.run import load_with_name
from async_rl.config.loading import load
from async_rl.errors import ConfigError
from async_rl.launch.commands import command, environment, learner_environment, ranks_command
from async_rl.launch.local import prepare_folder, specs
from tests.support.run_processes import finished
from tests.support.waiting import PATIENCE_S

QUICKSTART = ("@", "configs/quickstart.yaml")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("rum",), "did you mean `async-rl run`?"),
        (("buffer", "stat"), "did you mean `async-rl buffer stats`?"),
        (("run", *QUICKSTART, "--staleness.maxage", "3"), "did you mean staleness.max_age?"),
        (("run", "@", "nowhere.yaml"), "cannot read nowhere.yaml"),
        (("learner", *QUICKSTART), "run.name is not set"),
        (("buffer", "stats", *QUICKSTART, "--json"), "run.name is not set"),
        (("learner", *QUICKSTART, "--run.name", "r", "--node", "1"), "--node 1: launch.learner_nodes is 1, and its machines"),
        (
            ("reward", "serve"),
            "no file was given; name that of a run of `async-rl train`, for example: @ runs/NAME/config.yaml",
        ),
        (("reward", "serve", *QUICKSTART), "method: is not set; a run of `async-rl train` has one of sft, dpo, rm, distill"),
        (("reward", "serve", "--port", "x"), "--port 'x' is not a number"),
        (("reward", "serve", "--checkpoint"), "--checkpoint needs a value: --checkpoint FOLDER"),
        (("env", "serve"), "env serve needs TYPE: async-rl env serve TYPE"),
        (("env", "serve", "counting", "--port", "99999"), "--port 99999: must be at least 0 and at most 65535"),
        (("env", "serve", "counting", "--max-episodes", "0"), "--max-episodes 0: must be at least 1"),
        (("buffer", "serve", "here"), "buffer serve takes no operand 'here': async-rl buffer serve @ run/config.yaml"),
        (("buffer", "serve", "@", "nowhere.yaml"), "cannot read nowhere.yaml"),
        (
            ("config", "check", *QUICKSTART, "--model.folder", "/x"),
            "exactly one of model.name (a model on the Hugging Face Hub), model.folder and model.size (--model.size null",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence_and_code_2(tmp_path: Path, args: tuple[str, ...], sentence: str) -> None:
    done = finished(tmp_path, *args)
    assert done.returncode == ConfigError.exit_code
    assert sentence in done.stderr
    assert done.stderr.startswith("async-rl: ")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    made = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert made == {"output", "errors"}, "nothing is made before the configuration is known to be right"


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch([]) == 0
    said = capsys.readouterr().out
    assert all(verb.words in said and verb.help in said for verb in VERBS)


def test_each_verb_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert dispatch([*verb.words.split(), "--help"]) == 0
        assert verb.help in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--version"]) == 0
    assert capsys.readouterr().out == f"async-rl {async_rl.__version__}\n"


def test_show_says_where_each_value_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["config", "show", *QUICKSTART, "--run.seed", "3"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["run.seed"].endswith("# command line")
    assert "quickstart.yaml:" in lines["model.size.hidden"]
    assert "#" not in lines["leases.ticket_s"]


def test_schema_is_json_with_the_fields_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert "on-policy" in schema["$defs"]["StalenessConfig"]["properties"]["max_age"]["description"]


def test_check_says_what_the_limits_come_to(tmp_path: Path) -> None:
    done = finished(tmp_path, "config", "check", *QUICKSTART, "--staleness.max_age", "1", "--batch.groups_per_step", "4")
    assert done.returncode == 0, done.stderr
    assert "at most 8 groups" in done.stdout


def test_a_run_without_a_name_gets_one() -> None:
    assert load_with_name(QUICKSTART).run.name.startswith("quickstart-2")
    assert load_with_name([*QUICKSTART, "--run.name", "mine"]).run.name == "mine"


def test_the_processes_of_a_run(tmp_path: Path) -> None:
    config = load([*QUICKSTART, "--run.name", "r", "--run.folder", str(tmp_path), "--worker.processes", "2"])
    written = prepare_folder(config)
    assert load(["@", str(written)]) == config
    made = specs(config, {"PATH": "/bin"})
    assert [spec.name for spec in made] == ["buffer", "learner", "worker-0", "worker-1"]
    assert all(list(spec.command[-2:]) == ["@", str(written)] for spec in made)
    assert all(spec.environment["PYTHONSAFEPATH"] == "1" for spec in made)
    assert [spec.log for spec in made if spec.log is None] == [None], "the learner alone speaks on the terminal"
    elsewhere = load(["@", str(written), "--redis.url", "redis://elsewhere"])
    assert [spec.name for spec in specs(elsewhere, {})] == ["learner", "worker-0", "worker-1"]


def test_the_written_configuration_means_the_same_run_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load([*QUICKSTART, "--run.name", "r"])
    written = prepare_folder(config)
    folder = config.run_folder
    monkeypatch.chdir("/")
    assert load(["@", str(written)]).run_folder == folder


def test_one_thread_each_on_a_cpu_unless_told_otherwise() -> None:
    config = load([*QUICKSTART, "--device", "cpu"])
    assert environment(config, {})["OMP_NUM_THREADS"] == "1"
    assert environment(config, {"OMP_NUM_THREADS": "6"})["OMP_NUM_THREADS"] == "6"
    assert "OMP_NUM_THREADS" not in environment(load([*QUICKSTART, "--device", "cuda"]), {})


@pytest.mark.parametrize(("layout", "wanted"), [({}, None), ({"tensor": 2}, "1"), ({"context": 2}, "1"), ({"expert": 2}, None)])
def test_kernels_wait_for_each_other_only_in_learners_that_need_it(layout: dict[str, int], wanted: str | None) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    sizes = [word for key, size in layout.items() for word in (f"--learner.parallel.{key}", str(size))]
    config = load([*QUICKSTART, *sizes])
    shared = environment(config, {})
    assert name not in shared
    assert learner_environment(config, shared).get(name) == wanted
    assert learner_environment(config, {name: "8"})[name] == "8"


def test_several_ranks_have_a_parent() -> None:
    config = load([*QUICKSTART, "--run.name", "r", "--learner.parallel.tensor", "2"])
    assert command("learner", ["@", "x"])[1:] == ["-P", "-m", "learner", "@", "x"]
    assert ranks_command("learner", ["@", "x"], load([*QUICKSTART, "--run.name", "r"])) == command("learner", ["@", "x"])
    parent = ["-P", "-m", "async_rl.supervision.processes.ranks", "2", str(config.run_folder / "logs")]
    assert ranks_command("learner", ["@", "x"], config)[1:] == [*parent, "learner", "@", "x"]


def test_a_role_verb_becomes_the_role(tmp_path: Path) -> None:
    """The process that was started is the role itself: a stand-in interpreter shows what it is given."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$$" "$PYTHONSAFEPATH" "$@"\nexit 7\n')
    stand_in.chmod(0o755)
    script = f"import sys; sys.executable = {str(stand_in)!r}; from async_rl.cli.main import main; main()"
    line = [sys.executable, "-P", "-c", script, "buffer", "stats", *QUICKSTART, "--run.name", "r", "--json"]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7
    expected = f"{process.pid} 1 -P -m buffer stats @ configs/quickstart.yaml --run.name r --json"
    assert said.strip() == expected


def test_what_is_shown_lacks_the_password_of_sentinels(capsys: pytest.CaptureFixture[str]) -> None:
    address = "redis+sentinel://me:secret@a,b/main"
    assert dispatch(["config", "show", *QUICKSTART, "--redis.url", address]) == 0
    shown = capsys.readouterr().out
    assert "redis+sentinel://***@a,b/main" in shown
    assert "secret" not in shown


def test_a_reader_that_has_read_enough_gets_no_traceback() -> None:
    program = f"{sys.executable} -P -c 'from async_rl.cli.main import main; main()'"
    line = f"{program} config show @ configs/quickstart.yaml | head -n 1"
    done = subprocess.run(["bash", "-c", f"{line}; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141"), "0 if all was written before the reader left"
