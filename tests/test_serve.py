"""bench/serve.py without a server: what is sent, and what its records become."""

from __future__ import annotations

import argparse
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import serve
import serve_report
import tiny_models
from test_export import make

from carryover_ext import bench

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 30.0
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="target"} 1.7e9
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 10.0
vllm:num_requests_running{engine="0",model_name="target"} 1.0
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """As much of vLLM's server as the benchmark uses; it streams three chunks of text."""

    asked: ClassVar[list[dict]] = []

    def do_GET(self) -> None:
        self.reply(METRICS if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        chunks = [{"choices": [{"text": text}]} for text in ("a", "bc", "d")]
        chunks.append({"choices": [], "usage": {"completion_tokens": 7}})
        self.reply("".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def options(**changes: object) -> argparse.Namespace:
    values = {"max_new_tokens": 9, "forced_acceptance": None, "vllm_args": "--swap-space 0"}
    values |= {"concurrency": "1,4", "temperature": "0", "repeat": 2, "resident": False, "compile": False}
    values |= {"target": "t", "drafter": None, "baseline": None, "tokens": None, "dtype": "float32"}
    values |= {"drop_markov": False, "kind": None}
    return argparse.Namespace(**(values | {"max_model_len": 512} | changes))


def test_counters(url: str) -> None:
    assert serve.counters(url) == {
        "num_drafts": 40.0,
        "num_accepted_tokens": 30.0,
        "num_accepted_tokens_per_pos/0": 20.0,
        "num_accepted_tokens_per_pos/1": 10.0,
    }
    assert serve.answers(url) and not serve.answers("http://127.0.0.1:9")


def test_requests(url: str) -> None:
    Handler.asked.clear()
    server = serve.Server("baseline", url, None, Path("log"))
    record = serve.drive(server, [[1, 2], [3]], options(), 2, 0.5, 3)
    assert [reply["text"] for reply in record["replies"]] == ["abcd", "abcd"]
    assert all(reply["tokens"] == 7 and reply["tpot"] >= 0 for reply in record["replies"])
    assert sorted(body["prompt"] for body in Handler.asked) == [[1, 2], [3]]
    assert record["repetition"] == 3 and all(body["seed"] == 3 for body in Handler.asked)
    assert all(body["temperature"] == 0.5 and body["max_tokens"] == 9 for body in Handler.asked)


def test_command(tmp_path: Path) -> None:
    target = tiny_models.save_target(tmp_path / "target")
    drafter = tiny_models.save_drafter(tmp_path / "carry", True)
    args = options(target=str(target), drafter=str(drafter), out=tmp_path / "out")
    plain = serve.command(args, bench.ARMS["plain"], 80)
    assert "--speculative-config" not in plain and plain[-2:] == ["--swap-space", "0"]
    assert ("--enforce-eager" in plain) != serve.on_gpu()
    assert plain[plain.index("--max-num-seqs") + 1] == "4"
    serve.export_drafters(args, [bench.ARMS["carryover"]], True)
    command = serve.command(args, bench.ARMS["carryover"], 80)
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative["method"] == "dflash" and speculative["num_speculative_tokens"] == 5
    assert (Path(speculative["model"]) / "model.safetensors").is_file()
    args.forced_acceptance = 2.5
    command = serve.command(args, bench.ARMS["carryover"], 80)
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative["rejection_sample_method"] == "synthetic"
    assert speculative["synthetic_acceptance_length"] == 2.5


@pytest.mark.parametrize("sampled", [False, True])
def test_the_baseline_gets_a_zero_embedding_where_the_plugin_must_mend(tmp_path: Path, monkeypatch, sampled):
    target = tiny_models.save_target(tmp_path / "target")
    baseline = tiny_models.save_drafter(tmp_path / "base", False)
    args = options(target=str(target), baseline=str(baseline), out=tmp_path / "out")
    for gpu in (True, False):
        monkeypatch.setattr(serve, "on_gpu", lambda gpu=gpu: gpu)
        serve.export_drafters(args, [bench.ARMS["plain"], bench.ARMS["baseline"]], sampled)
        config = json.loads((tmp_path / "out" / "drafters" / "baseline" / "config.json").read_text())
        carries = config["architectures"] == ["DFlashCarryoverDraftModel"]
        assert carries == (sampled and not gpu)


def test_a_missing_drafter_is_said_before_any_server_starts(monkeypatch) -> None:
    arguments = ["serve.py", "--target", "qwen2.5-coder-0.5b", "--arms", "plain,carryover"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", "runs/never"])
    monkeypatch.setattr(serve.Path, "mkdir", lambda *_, **__: None)
    monkeypatch.setattr(serve.bench, "CHECKPOINTS", Path("nowhere"))
    with pytest.raises(SystemExit, match=r"0.5b: no (markov|dflash) carryover drafter for it.*--drafter"):
        serve.main()


@pytest.mark.parametrize("resident", [False, True])
def test_the_order_of_the_arms_rotates(monkeypatch, resident: bool) -> None:
    """One server at a time unless told otherwise; every arm is measured in every cell and repetition."""
    up: list[str] = []
    most, starts = 0, []

    @contextmanager
    def warm(args, arm, prompt):
        nonlocal most
        up.append(arm.name)
        starts.append(arm.name)
        most = max(most, len(up))
        yield arm
        up.remove(arm.name)

    monkeypatch.setattr(serve, "warm", warm)
    monkeypatch.setattr(
        serve,
        "drive",
        lambda arm, prompts, args, level, t, i: {"arm": arm.name, "cell": (t, level), "repetition": i},
    )
    arms = list(bench.ARMS.values())[:3]
    found = list(serve.measure(options(temperature="0,1", resident=resident), arms, [[1]]))
    assert {(r["arm"], r["cell"], r["repetition"]) for r in found} == {
        (arm.name, (t, n), i) for arm in arms for t in (0.0, 1.0) for n in (1, 4) for i in (0, 1)
    }
    assert len(found) == 24 and not up
    names = [arm.name for arm in arms]
    assert starts == (names if resident else [*names, *names[1:], names[0]])
    assert most == (3 if resident else 1)


def test_spread_takes_a_prompt_of_each_task_in_turn() -> None:
    prompts = [bench.Prompt(str(i), "ab"[i >= 3], ("x",)) for i in range(5)]
    assert [p.id for p in serve.spread(prompts, 4)] == ["0", "3", "1", "4"]
    assert len(serve.spread(prompts, 99)) == 5


def record(arm: str, repetition: int, seconds: float, texts: str, drafts: float = 0, kept: float = 0) -> dict:
    replies = [{"text": t, "tokens": 10, "ttft": 0.1, "tpot": seconds / 20} for t in texts]
    counters = {"num_drafts": drafts, "num_accepted_tokens": kept, "num_accepted_tokens_per_pos/0": kept}
    shape = {"concurrency": 1, "temperature": 0.0, "repetition": repetition}
    return {
        "arm": arm,
        "seconds": seconds,
        "replies": replies,
        "counters": counters if drafts else {},
    } | shape


def test_report(tmp_path: Path) -> None:
    """Ratios are taken within a repetition, then their median; AL counts the bonus token."""
    records = [
        record("plain", 0, 4.0, "ab"),
        record("carryover", 0, 2.0, "ab", 10, 8),
        record("carryover", 1, 6.0, "ax", 10, 2),
        record("plain", 1, 8.0, "ab"),
        record("plain", 2, 2.0, "ab"),
        record("carryover", 2, 0.5, "ab", 10, 2),
    ]
    settings = {"target": "t", "dtype": "float32", "arms": ["plain", "carryover"], "asked": 2}
    settings |= {"prompts": "p", "max_new_tokens": 10, "repeat": 3, "forced_acceptance": None}
    doc = serve_report.document(settings, {"summary": "here", "vllm": "vllm 0"}, records)
    [cell] = doc["cells"]
    plain, carry = cell["rows"]
    assert plain["al"] is None
    assert plain["to_plain"] == 1.0
    assert carry["al"] == 1 + 12 / 30 and carry["per_position"] == [12 / 30]
    assert carry["to_plain"] == 2.0  # of 2, 4/3, 4
    assert carry["tokens_per_second"] == 10.0  # of 10, 10/3, 40
    assert (carry["equal"], carry["compared"]) == (5, 6)
    text = "\n".join(serve_report.tables(doc))
    assert "| ON | 1.40 | 40 |" in text and "5 of 6" in text
    for path in serve_report.write(doc, tmp_path):
        assert path.stat().st_size > 0
    assert json.loads((tmp_path / "serve.json").read_text())["cells"] == doc["cells"]


def test_a_markov_drafter_on_a_cpu(tmp_path: Path, monkeypatch) -> None:
    """vLLM's V2 runner alone has them, and it needs a GPU."""
    target = tiny_models.save_target(tmp_path / "target")
    drafter = make(tmp_path / "carry", markov=True)
    for gpu, drop, method in ((True, False, "dspark"), (True, True, "dflash"), (False, True, "dflash")):
        monkeypatch.setattr(serve, "on_gpu", lambda gpu=gpu: gpu)
        args = options(target=str(target), drafter=str(drafter), out=tmp_path / "out", drop_markov=drop)
        serve.export_drafters(args, [bench.ARMS["carryover"]], False)
        command = serve.command(args, bench.ARMS["carryover"], 80)
        assert json.loads(command[command.index("--speculative-config") + 1])["method"] == method
    # Of the repository's own, --drop-markov means the Markov ones.
    args = options(target="smollm2-135m", drop_markov=True, kind="dflash", out=tmp_path / "out")
    with pytest.raises(bench.UserError, match="--drop-markov: DFlash drafters have no Markov head"):
        serve.export_drafters(args, [bench.ARMS["carryover"]], False)
    args = options(target=str(target), drafter=str(drafter), out=tmp_path / "out", drop_markov=False)
    with pytest.raises(bench.UserError, match="needs vLLM's V2 runner, hence a GPU, or --drop-markov"):
        serve.export_drafters(args, [bench.ARMS["carryover"]], False)
