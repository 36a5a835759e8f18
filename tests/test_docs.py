"""The programs in the documentation print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from branchwise import set_default_backend

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    "constraints.md", "from-guidance.md", "from-outlines.md", "from-sglang.md", "language.md", "performance.md",
    "quickstart.md", "radix-attention.md", "seeing.md", "tokens.md",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_programs_of_a_page_print_what_the_page_says(
    demo_model: Path, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for program, printed in blocks:
        exec(compile(program, "example.py", "exec", dont_inherit=True), names)
        assert capsys.readouterr().out == printed, program
    set_default_backend(None)
    names["engine"].close()  # type: ignore[attr-defined]  # an Engine


def test_no_page_with_programs_is_left_out() -> None:
    with_programs = {page.name for page in DOCS.glob("*.md") if "```python" in page.read_text(encoding="utf-8")}
    assert with_programs - {"remote.md"} == set(PAGES)  # its programs need a server


def test_every_link_and_picture_of_a_page_is_there() -> None:
    for page in DOCS.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (DOCS / link).exists(), f"{page.name}: {link}"


def test_the_menu_of_the_site_has_every_page() -> None:
    menu = (DOCS / "website" / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    assert set(re.findall(r"[\w-]+\.md", menu)) == {page.name for page in DOCS.glob("*.md")}


SGLANG = """
    Engine Runtime RuntimeEndpoint Anthropic LiteLLM OpenAI VertexAI global_config set_default_backend flush_cache
    get_server_info function gen gen_int gen_string select image video separate_reasoning system user assistant
    system_begin system_end user_begin user_end assistant_begin assistant_end
    token_length_normalized greedy_token_selection unconditional_likelihood_normalized
    max_tokens max_new_tokens min_tokens n stop stop_token_ids stop_regex temperature top_p top_k min_p
    frequency_penalty presence_penalty ignore_eos return_logprob logprob_start_len top_logprobs_num
    return_text_in_logprobs dtype choices choices_method regex json_schema num_api_spec_tokens
    run run_batch num_threads progress_bar generator_style stream backend bind trace compile cache
    text messages sync error text_iter text_async_iter get_var set_var get_meta_info ret_value var_scope fork
    position_ids_offset copy join concate_and_append
"""
"""What SGLang's frontend exports, the options of its calls, and the methods of its programs, states and forks."""


def test_every_name_of_sglangs_frontend_has_its_place() -> None:
    page = (DOCS / "from-sglang.md").read_text(encoding="utf-8")
    spelled = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    assert set(SGLANG.split()) <= spelled
