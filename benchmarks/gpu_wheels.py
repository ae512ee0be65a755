"""Fetch what a GPU machine without a package index lacks, as wheels to carry over.

usage: python benchmarks/gpu_wheels.py [--into .whl] [--python 3.12] [--there NAME ...]

Follows the dependencies of pyproject.toml, without its extras, to their own. A package that the machine already has
(`--there`, with all that it needs) is left out. On that machine, in a checkout:

    python -m pip install --no-index --no-deps --target .site .whl/*.whl
    PYTHONPATH=.site:. python benchmarks/gpu_check.py --json runs/gpu_check.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from email import message_from_bytes
from pathlib import Path

from gpu_checks.packages import required
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE = ("torch", "triton", "numpy", "transformers", "huggingface-hub", "aiohttp", "safetensors")
"""What an image for torch on GPUs has."""
GLIBC = (39, 38, 36, 35, 34, 31, 28, 27, 24, 17)
"""Minor versions of manylinux_2_N: pip takes only those that are listed."""


def fetch(roots: Sequence[Requirement], into: Path, python: str, there: Collection[str]) -> list[Path]:
    """Fetch a wheel for every requirement and for what it requires. Raises CalledProcessError if there is none."""
    found: dict[str, Path] = {}
    waiting = deque(roots)
    variables = marker_variables(python)
    while waiting:
        each = waiting.popleft()
        name = canonicalize_name(each.name)
        if name in there or name in found or (each.marker is not None and not each.marker.evaluate({**variables, "extra": ""})):
            continue
        found[name] = wheel = _download(each, into, python)
        waiting.extend(needs(wheel))
    return list(found.values())


def marker_variables(python: str) -> Mapping[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def needs(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        for line in message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", []):
            yield Requirement(line)


def _download(each: Requirement, into: Path, python: str) -> Path:
    wanted = [f"{each.name}{each.specifier}", "--python-version", python, "--implementation", "cp"]
    wanted += [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    wanted += [
        f"--platform={platform}" for platform in (*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), "manylinux2014_x86_64")
    ]
    with tempfile.TemporaryDirectory(dir=into) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        subprocess.run([*command, *wanted], check=True)
        (wheel,) = Path(folder).iterdir()
        return wheel.rename(into / wheel.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(".whl"), help="a folder, which is emptied of wheels before (.whl)")
    parser.add_argument("--python", default="3.12", help="the machine's version of Python (3.12)")
    parser.add_argument("--there", nargs="*", default=THERE, metavar="NAME", help=f"what the machine has ({' '.join(THERE)})")
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    for old in args.into.glob("*.whl"):
        old.unlink()
    try:
        wheels = fetch(required(), args.into, args.python, {canonicalize_name(name) for name in args.there})
    except subprocess.CalledProcessError as error:
        print(f"pip fetched no wheel: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    names = ", ".join(sorted(wheel.name.partition("-")[0] for wheel in wheels))
    print(f"{len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 1e6:.0f} MB, in {args.into}: {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
