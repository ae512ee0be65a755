"""Packages with kernels that are installed but cannot be used: the local layers work, and a sentence says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT, module_environment
from tests.support.waiting import PATIENCE_S

ASKED = """
from async_rl.errors import ConfigError
from async_rl.megatron import compat
from async_rl.megatron.layers import specs

print(compat.HAVE_TRANSFORMER_ENGINE, compat.HAVE_FLASH_ATTENTION)
try:
    specs.require_transformer_engine()
except ConfigError as error:
    print(error)
"""


def test_a_broken_transformer_engine_and_the_namespace_of_flash_attention_4_stop_nothing(tmp_path: Path) -> None:
    engine, namespace = tmp_path / "transformer_engine", tmp_path / "flash_attn" / "cute"
    (engine / "pytorch").mkdir(parents=True)
    namespace.mkdir(parents=True)
    (engine / "__init__.py").touch()
    # what the released packages raise without a torch part
    (engine / "pytorch" / "__init__.py").write_text("raise FileNotFoundError('Could not find shared object file')\n")
    (namespace / "__init__.py").touch()  # `flash_attn` itself stays without an __init__, and without a version
    asked = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", ASKED],
        env=module_environment(PYTHONPATH=f"{tmp_path}:{ROOT}", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert asked.returncode == 0, asked.stderr
    found, sentence = asked.stdout.splitlines()
    assert found == "False False"
    assert "installed but cannot be used (FileNotFoundError: Could not find shared object file)" in sentence
    assert asked.stderr == ""
