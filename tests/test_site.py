"""The site of the documents builds without a warning, and a browser shows its pages without an error."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.html": ["images/state.png", 'href="quickstart.html"'],
    "radix-attention.html": ["images/moment-9.svg", "Nine moments"],
    "api.html": ['id="branchwise.gen"', "branchwise.Branches", 'id="branchwise.interpreter.local.Engine.save_cache"'],
    "examples.html": ['href="examples/agent.py"', "prefix hits"],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = ROOT / "docs" / "website" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_what_it_is_for_and_calls_no_other_server(site: Path, page: str) -> None:
    html = (site / page).read_text(encoding="utf-8")
    for text in PAGES[page]:
        assert text in html
    assert not re.search(r"""(?:<script[^>]*src|<link[^>]*href|<img[^>]*src)=["']?https?:""", html)
    for picture in re.findall(r'<img[^>]*src="([^"]+)"', html):
        assert (site / picture).is_file(), picture


@pytest.mark.slow
def test_a_browser_shows_the_pages_without_an_error(address: str, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs a Chromium on the PATH")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    for page in PAGES:
        command = [browser, *flags, "--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom"]
        done = subprocess.run([*command, f"{address}/{page}"], capture_output=True, text=True, timeout=100, check=True)
        errors = re.findall(r".*CONSOLE.*", done.stderr)
        assert not errors, errors
