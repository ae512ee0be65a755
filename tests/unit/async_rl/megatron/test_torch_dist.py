"""Megatron-LM's checkpoints: what megatron-core saved is imported, what is exported megatron-core loads, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.export import FolderExtras
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.megatron.torch_dist.arguments import not_said
from async_rl.megatron.torch_dist.reading import RELEASE, TRACKER
from async_rl.megatron.torch_dist.writing import write_checkpoint
from async_rl.models.hf_config import read_config, read_shape
from learner.models.__main__ import main
from tests.support.model_families import SIZES, oracle, write_model
from tests.support.warm_processes import play_ranks
from tests.unit.async_rl.megatron.torch_dist_rank import NAMES, SAVED, tokens


def export(folder: Path, to: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    shape = read_shape(folder)
    extras = FolderExtras(generation={"eos_token_id": 3})
    write_checkpoint(to, shape, {**load_folder(folder, shape, dtype)}, dtype=dtype, iteration=5, extras=extras)
    return to


def import_(checkpoint: Path, to: Path, *words: str) -> Path:
    main(["import", str(checkpoint), "--format", "megatron", "--to", str(to), *words])
    return to


@pytest.fixture(scope="module")
def with_megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what two ranks saved, and their logits of it and of what was exported here."""
    folder = tmp_path_factory.mktemp("megatron")
    for name in NAMES:
        write_model(name, folder / name)
        export(folder / name, folder / f"written-{name}")
    play_ranks("tests.unit.async_rl.megatron.torch_dist_rank", folder)
    return folder


@pytest.mark.parametrize("name", SAVED)
def test_what_megatron_core_saved_on_two_ranks_is_imported(with_megatron: Path, name: str, tmp_path: Path) -> None:
    saved = with_megatron / f"saved-{name}"
    alone, named = import_(saved, tmp_path / "alone"), import_(saved, tmp_path / "like", "--like", str(with_megatron / name))
    assert (read_config(alone)["vocab_size"], read_config(named)["vocab_size"]) == (64, SIZES["vocab_size"])
    wanted = load_file(with_megatron / "logits.safetensors")[f"saved.{name}"]
    for folder in (alone, named):
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits[0, :, : SIZES["vocab_size"]]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_megatron_core_loads_what_is_exported(with_megatron: Path, name: str) -> None:
    with torch.no_grad():
        wanted = oracle(name)(tokens()).logits[0]
    found = load_file(with_megatron / "logits.safetensors")[f"loaded.{name}"]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


BACK = (
    "llama-one-kv-head", "llama-tied-llama3", "mistral", "qwen2-linear", "qwen3-yarn", "qwen3_moe-mixed", "qwen2_moe", "olmo2",
    "gemma3_text",
)  # fmt: skip


@pytest.mark.parametrize("name", BACK)
def test_every_family_comes_back_bit_by_bit(name: str, tmp_path: Path, capsys: Any) -> None:
    original = tmp_path / "original"
    write_model(name, original)
    is_described = not not_said(shape := read_shape(original)) and shape.window is None and shape.rope_scaling is None
    checkpoint = export(original, tmp_path / "megatron", dtype=torch.bfloat16)
    assert (checkpoint / TRACKER).read_text() == RELEASE
    described = ["--like", str(checkpoint / "huggingface")]
    for words in (described, []) if is_described else (described,):
        again = import_(checkpoint, tmp_path / f"again{len(words)}", *words)
        assert "iteration 5" in capsys.readouterr().out
        back, wanted = (load_folder(each, shape, torch.bfloat16) for each in (again, original))
        assert all(torch.equal(back[each], tensor) for each, tensor in wanted.items())
        if words:
            assert read_config(again) == read_config(checkpoint / "huggingface")
    if not is_described:
        with pytest.raises(ConfigError, match=r"--like FOLDER|has shape"):
            import_(checkpoint, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    write_model("qwen3", folder / "qwen3")
    return export(folder / "qwen3", folder / "megatron")


def changed(checkpoint: Path, to: Path, arguments: dict[str, Any] | None) -> Path:
    """A copy whose arguments are others, or are missing."""
    to.mkdir()
    for path in (checkpoint / RELEASE).iterdir():
        (to / path.name).symlink_to(path)
    common = torch.load(to / "common.pt", weights_only=False)
    (to / "common.pt").unlink()
    own = common.pop("args")
    if arguments is not None:
        common["args"] = type(own)(**(vars(own) | arguments))
    torch.save(common, to / "common.pt")
    return to


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (None, r"does not have Megatron-LM's arguments .*--like FOLDER"),
        ({"hidden_size": None}, "do not describe a model"),
        ({"position_embedding_type": "learned_absolute"}, r"\(position_embedding_type 'learned_absolute'\).*--like FOLDER"),
        ({"add_bias_linear": True, "swiglu": False}, "add_bias_linear True and swiglu False"),
        ({"no_rope_freq": [0, 0, 1]}, r"no_rope_freq \[0, 0, 1\]"),
        ({"num_layers": 4}, r"has shape \(3, .*the model's is \(4, "),
        ({"ffn_hidden_size": 64}, r"linear_fc1.weight has shape \(3, 112, 32\), and the model's is \(3, 128, 32\)"),
        ({"qk_layernorm": False}, r"has 2 tensors that the model lacks, the first is .*k_layernorm"),
        ({"add_qkv_bias": True, "qk_layernorm": False}, r"lacks 1 tensors of the model, the first is .*linear_qkv.bias"),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence(
    exported: Path, tmp_path: Path, arguments: dict[str, Any] | None, says: str
) -> None:
    checkpoint = changed(exported, tmp_path / "changed", arguments)
    with pytest.raises(ConfigError, match=says):
        import_(checkpoint, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_without_arguments_the_named_folder_describes_the_model(exported: Path, tmp_path: Path) -> None:
    checkpoint, like = changed(exported, tmp_path / "changed", None), exported / "huggingface"
    assert read_config(import_(checkpoint, tmp_path / "to", "--like", str(like)))["eos_token_id"] == 3
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**read_config(like), "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="describe different models: num_layers is 3 there and 2 here"):
        import_(exported, tmp_path / "refused", "--like", str(other))
    with pytest.raises(ConfigError, match=r"has shape \(3, 32\), and the model's is \(2, 32\)"):
        import_(checkpoint, tmp_path / "refused", "--like", str(other))


def test_what_is_no_checkpoint_of_this_format_is_refused(exported: Path, tmp_path: Path) -> None:
    def refused(says: str, folder: Path = tmp_path) -> None:
        with pytest.raises(ConfigError, match=says):
            import_(folder, tmp_path / "to")

    refused("has no checkpoint of Megatron-LM", tmp_path / "nowhere")
    refused("has no checkpoint of Megatron-LM")
    (tmp_path / TRACKER).write_text("12")
    refused("names iter_0000012, which is not there")
    (tmp_path / "iter_0000012/mp_rank_00").mkdir(parents=True)
    refused("format `torch`.*--ckpt-convert-format torch_dist")
    (tmp_path / "iter_0000012/mp_rank_00").rmdir()
    (tmp_path / "iter_0000012/metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused("format 'zarr'; only torch_dist is read")
    (tmp_path / "iter_0000012/metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    refused("iter_0000012 cannot be read")
    (tmp_path / "iter_0000012/.metadata").write_bytes(b"damaged")
    refused("iter_0000012 cannot be read")
    (tmp_path / TRACKER).write_text("soon")
    refused("names no checkpoint: 'soon'")
    damaged = changed(exported, tmp_path / "damaged", {})
    for path in damaged.glob("*.distcp"):
        path.unlink()
    refused("damaged cannot be read", damaged)
    with pytest.raises(ConfigError, match="--like belongs to --format megatron"):
        main(["import", str(exported / "huggingface"), "--to", str(tmp_path / "to"), "--like", "x"])
