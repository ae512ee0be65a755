"""The pages of docs/ that are made from the code are what the code says."""

from __future__ import annotations

import runpy
from collections.abc import Callable

import pytest

from async_rl.cli.config_page import reference_page
from async_rl.cli.main import VERBS
from async_rl.cli.metrics_page import metrics_page
from async_rl.cli.verbs_page import verbs_page
from async_rl.config import Config
from tests.support.repository import ROOT


def python_api() -> str:
    return runpy.run_path(str(ROOT / "docs" / "site" / "python_api.py"))["python_api"]()


PAGES: dict[str, Callable[[], str]] = {
    "configuration_keys": lambda: reference_page(Config.model_json_schema()),
    "metric_names": metrics_page,
    "verbs": lambda: verbs_page(VERBS),
    "python_api": python_api,
}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_what_the_code_says(page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text() == PAGES[page](), "run `make reference`"
