"""``verify`` against a server whose cache and faults are known: what it finds, reports and returns."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kit import fake_sglang
from kit.fake_sglang import FakeSglang, serving
from sglang_bitexact import cli

_SMALL = ["--lengths", "700", "--suffixes", "none", "--chats", "0", "--settle", "0", "--vocab", "512"]


@pytest.fixture
def fake() -> FakeSglang:
    return FakeSglang()


@pytest.fixture
def url(fake) -> Iterator[str]:
    with serving(fake) as address:
        yield address


def _verify(url, capsys, *arguments) -> tuple[int, dict]:
    code = cli.main(["verify", "--url", url, "--json", *_SMALL, *arguments])
    return code, json.loads(capsys.readouterr().out)


def _rows(report) -> dict:
    return {(row["tier"], row["kind"]): row for row in report["rows"]}


def test_an_exact_server_passes_with_the_reused_tokens_counted(url, capsys):
    code, report = _verify(url, capsys)
    assert (code, report["verdict"]) == (0, "3 hits, no difference.")
    # Depths 256, 512 and 700 of 700 tokens: 256 + 512 + 512 are whole pages.
    assert _rows(report) == {
        ("device", "boundary"): {
            "tier": "device",
            "kind": "boundary",
            "comparisons": 3,
            "differing_outputs": 0,
            "max_abs_logprob_diff": 0.0,
            "nominal_cached_tokens": 1280,
            "reported_cached_tokens": 1280,
            "no_hit": 0,
        }
    }
    assert report["cold_against_cold"] == {
        "comparisons": 1,
        "differing_outputs": 0,
        "max_abs_logprob_diff": 0.0,
    }


def test_one_wrong_logprob_at_one_depth_is_found_with_its_place(fake, url, capsys):
    fake.fault = lambda tier, reused: 2**-20 if reused == 256 else 0.0
    code, report = _verify(url, capsys)
    assert code == 1 and report["verdict"] == "1 of 3 hits differ from their cold run."
    (found,) = report["differences"]
    assert (found["tier"], found["seed"], found["length"], found["held"]) == ("device", 0, 700, 256)
    assert found["difference"] == {"position": 7, "logprob": 2**-20}
    again = ["--lengths", "700", "--depths", "256", "--suffixes", "none", "--seed", "0"]
    assert found["repeat"].split() == again
    assert _verify(url, capsys, *again)[1]["differing_outputs"] == 1


def test_progress_is_a_line_per_step_where_stderr_is_no_terminal(url, capsys):
    cli.main(["verify", "--url", url, "--json", *_SMALL, "--tiers", "device,host"])
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "verify 0/6: other traffic in every request slot",
        "verify 0/6: cold against cold",
        "verify 0/6: device: 3 prompts",
        "verify 3/6: host: 3 prompts",
        # Whole pages of 1.1 x 4,096 tokens, less the 768 that priming the other two is sure to bring.
        "verify 3/6: host: 3840 tokens of other traffic",
    ]
    json.loads(captured.out)


def test_no_filler_is_longer_than_the_server_takes(fake, url, capsys):
    """A quarter of the device tier, its usual length, is on a real server longer than the context."""
    fake.longest = 800
    code, report = _verify(url, capsys, "--tiers", "host", "--concurrency", "1")
    assert (code, report["verdict"]) == (0, "3 hits, no difference.")
    assert {row["tier"] for row in report["rows"]} == {"host"}
    assert max(len(request["input_ids"]) for request in fake.requests) == 768


@pytest.mark.parametrize("wrong", ["device", "host", "storage"])
def test_each_tier_is_reached_and_a_fault_in_it_is_its_own(fake, url, capsys, wrong):
    fake.fault = lambda tier, reused: 0.5 * (tier == wrong)
    lengths = ["--lengths", "600,700,800,1100", "--tiers", "device,host,storage", "--concurrency", "1"]
    code, report = _verify(url, capsys, *lengths)
    found = {tier: (row["comparisons"], row["differing_outputs"]) for (tier, _), row in _rows(report).items()}
    assert found == {tier: (15, 15 * (tier == wrong)) for tier in ("device", "host", "storage")}
    assert code == 1 and fake.flushes == 1


def test_slots_have_another_owner_between_priming_and_hit(fake, url, capsys):
    _verify(url, capsys, "--depths", "512", "--concurrency", "1")
    names = [request["extra_key"] for request in fake.requests]
    hit = len(names) - 1
    prime = names.index(names[hit])
    between = fake.requests[prime + 1 : hit]
    assert len(fake.requests[prime]["input_ids"]) == 512 and len(fake.requests[hit]["input_ids"]) == 700
    assert len(between) == 2 and all(len(request["input_ids"]) > 128 for request in between)
    assert {request["extra_key"] for request in between}.isdisjoint({names[hit]})


def test_a_mixed_hit_is_a_row_of_its_own(fake, url, capsys):
    def keep_the_first_page(namespace, tokens):
        FakeSglang._insert(fake, namespace, tokens)
        for name in list(fake_sglang._pages(namespace, tokens))[1:]:
            del fake._pages["device"][name]

    fake._insert = keep_the_first_page
    code, report = _verify(url, capsys, "--depths", "512")
    assert list(_rows(report)) == [("device+host", "boundary")]
    assert code == 2 and report["verdict"] == "No hit in: device. Nothing was compared there."


def test_a_tier_without_hits_is_an_error(fake, url, capsys):
    fake._pages["host"] = _Never()
    code, report = _verify(url, capsys, "--tiers", "device,host", "--depths", "512")
    # The device's own hits are fine; what should have been in the host came from storage.
    assert (code, report["verdict"]) == (2, "No hit in: host. Nothing was compared there.")


class _Never(dict):
    def __contains__(self, key: object) -> bool:
        return False

    def move_to_end(self, key: object) -> None:
        pass


def test_a_run_without_a_hit_is_no_comparison(url, capsys):
    code, report = _verify(url, capsys, "--lengths", "3,700", "--depths", "none")
    row = _rows(report)["device", "boundary"]
    assert code == 0 and (row["comparisons"], row["no_hit"]) == (3, 1)
    code, report = _verify(url, capsys, "--lengths", "3")
    assert code == 2 and report["verdict"] == "No hit in: device. Nothing was compared there."


def test_cold_runs_that_differ_end_it(fake, url, capsys):
    fake.deterministic = False
    code, report = _verify(url, capsys)
    assert code == 1 and report["rows"] == []
    assert report["verdict"].startswith("The server is not deterministic to begin with")


def test_a_server_that_ignores_namespaces_is_refused(fake, url, capsys):
    fake.namespaces = False
    code, report = _verify(url, capsys)
    assert code == 2 and "does not keep extra_key namespaces apart" in report["error"]


def test_suffixes_share_what_one_request_cached(fake, url, capsys):
    report = _verify(url, capsys, "--lengths", "none", "--suffixes", "1,4,129", "--bases", "512")[1]
    row = _rows(report)["device", "suffix"]
    assert (row["comparisons"], row["reported_cached_tokens"]) == (3, 3 * 512)
    assert sum(len(request["input_ids"]) == 512 for request in fake.requests) == 1


def test_from_storage_each_suffix_is_loaded_anew(fake, url, capsys):
    arguments = ["--lengths", "none", "--suffixes", "1,4,129", "--bases", "512", "--tiers", "storage"]
    report = _verify(url, capsys, *arguments, "--concurrency", "1")[1]
    # One hit would bring the shared page to the device for the next.
    assert _rows(report)["storage", "suffix"]["comparisons"] == 3
    assert sum(len(request["input_ids"]) == 512 for request in fake.requests) == 3


def test_chats_continue_from_their_own_answers(fake, url, capsys):
    report = _verify(url, capsys, "--lengths", "none", "--chats", "1", "--turns", "3")[1]
    row = _rows(report)["device", "chat"]
    # Prompts of 330, 508 and 626 tokens; 337 and 515 were cached, so 256 and 512 are whole pages.
    assert (row["comparisons"], row["nominal_cached_tokens"], row["reported_cached_tokens"]) == (2, 768, 768)
    prompts = {len(request["input_ids"]): request["input_ids"] for request in fake.requests}
    assert prompts[626][:508] == prompts[508] and prompts[508][:330] == prompts[330]


def test_sampled_runs_need_a_deterministic_server(fake, url, capsys):
    code, report = _verify(url, capsys, "--sampled")
    assert code == 0 and "--enable-deterministic-inference" in report["sampled"]
    assert ("device", "sampled") not in _rows(report)


def test_sampled_runs_are_compared_where_they_can_be(fake, url, capsys):
    fake.follows_sampling_seed = True
    code, report = _verify(url, capsys, "--sampled")
    assert code == 0 and report["sampled"] is None
    assert _rows(report)["device", "sampled"]["comparisons"] == 3


def test_a_finished_comparison_is_not_done_again(fake, url, capsys, tmp_path):
    state = tmp_path / "state"
    first = _verify(url, capsys, "--state", str(state))
    lines = state.read_text().splitlines(keepends=True)
    # A kill in the middle of the last line.
    state.write_text("".join(lines[:-1]) + lines[-1][:20])
    fake.requests.clear()
    second = _verify(url, capsys, "--state", str(state))
    assert second == first and state.read_text().splitlines(keepends=True)[-1] == lines[-1]
    primed = [len(r["input_ids"]) for r in fake.requests if r["sampling_params"]["max_new_tokens"] == 1]
    assert [length for length in primed if length != 132] == [700]


def test_a_state_of_other_settings_is_refused(url, capsys, tmp_path):
    state = tmp_path / "state"
    _verify(url, capsys, "--state", str(state))
    code, report = _verify(url, capsys, "--state", str(state), "--new-tokens", "9")
    assert code == 2 and "the comparisons would mix" in report["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--url", "nonsense"], "Is the server up, and --url right?"),
    ],
)
def test_what_cannot_be_carried_out_is_said(capsys, arguments, words):
    assert cli.main(["verify", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_another_model_is_refused(fake, url, capsys):
    fake.model_type = "llama"
    code, report = _verify(url, capsys)
    assert code == 2 and "'llama'; expected 'deepseek_v4'" in report["error"]


def test_an_unknown_vocabulary_is_not_guessed(url, capsys):
    assert cli.main(["verify", "--url", url]) == 2
    assert "Give --vocab" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--lengths", "4-1"], ["--lengths", "0"], ["--tiers", "disk"]])
def test_wrong_arguments_end_with_code_2(url, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "--url", url, *arguments])
    assert ended.value.code == 2


def test_the_table_says_where_and_how_to_repeat(fake, url, capsys):
    fake.fault = lambda tier, reused: 1.0 if tier else 0.0
    assert cli.main(["verify", "--url", url, *_SMALL, "--depths", "256"]) == 1
    text = capsys.readouterr().out
    assert "device hit, boundary, seed 0, 700 tokens, 256 cached before, 256 reused: differs from token 7 on" in text
    assert "--lengths 700 --depths 256 --suffixes none --seed 0" in text
