"""`carpool predict --rows`: one line in, one line out, whatever the line holds."""

import io
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asked_rows import SGD, row
from carpool_core.products import find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer, Precision
from carpool_predictor.calibration.document import Calibration, RunMeasurement, RunPrediction, Stack
from carpool_predictor.calibration.observe import observe
from carpool_predictor.catalog import store
from carpool_predictor.cli import predict
from carpool_predictor.features import Abstention
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import predict as predict_on
from carpool_predictor.predict import prepare
from carpool_predictor.report import as_json, report_on
from carpool_predictor.rows import MAX_SINGLE_PROCESS, Answerer, WorkerDied, predict_rows
from carpool_predictor.tracing.process import TraceLimits, TraceRequest
from carpool_predictor.tracing.source import SubprocessTracer
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

A100 = find_product("A100-SXM4-40GB")
KEYS = {
    "id", "status", "reason", "message", "gpu", "memory", "activity", "step_time_s", "inside_training", "model_version",
    "elapsed_s",
}  # fmt: skip


TRAINING = Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM)


def vgg11() -> ModelFeatures:
    found = store.shipped().features(CatalogModel(name="timm/vgg11_bn"), TRAINING)
    assert found is not None
    return found


class FakeTracer(SubprocessTracer):
    """Traces one model that the store lacks, and records requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[TraceRequest] = []

    async def timed(self, request: TraceRequest) -> tuple[ModelFeatures | Abstention, float]:
        self.asked.append(request)
        return self._found(request), 7.0

    def _found(self, request: TraceRequest) -> ModelFeatures | Abstention:
        assert request.model is not None
        assert request.model.catalog is not None
        if request.model.catalog.name == "timm/nonsense":
            return Abstention(reason="UnknownCatalogModel", message="timm has no model 'nonsense'")
        if request.model.catalog.name == "timm/slow":
            return Abstention(reason="TraceTimedOut", message="took longer than 120 s; give spec.model.features")
        return msgspec.structs.replace(vgg11(), optimizer=request.training.optimizer)


def ask(*rows: Any, tracer: FakeTracer | None = None) -> list[dict[str, Any]]:
    lines = [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in rows]
    return [json.loads(line) for line in Answerer(tracer=tracer or FakeTracer()).answers(lines)]


def test_an_answer_equals_predict() -> None:
    (answer,) = ask(row())
    prediction = predict_on(vgg11(), TRAINING, [A100])
    memory = prediction.products[0].memory
    assert set(answer) == KEYS
    assert (answer["id"], answer["status"], answer["reason"]) == ("a", "ok", prediction.reason)
    parts = answer["memory"].pop("parts")
    assert sum(parts.values()) == memory.median_mib
    assert answer["memory"] == {
        "median_mib": memory.median_mib,
        "upper_mib": memory.upper_mib,
        "coverage": memory.coverage,
        "class": {"lower_mib": memory.class_lower_mib, "upper_mib": memory.class_upper_mib},
    }
    assert set(answer["activity"]) == {"gpu_util_percent", "sm_active_ratio", "sm_occupancy_ratio", "dram_active_ratio"}
    for interval in (*answer["activity"].values(), answer["step_time_s"]):
        assert interval["lower"] <= interval["median"] <= interval["upper"]
    assert answer["model_version"] == prediction.model_version
    assert answer["elapsed_s"] >= 0


def test_rows_with_steps_have_durations() -> None:
    """Rows that differ in steps share a prepared job."""
    short, long, unknown = ask(*(row(training=SGD | steps) for steps in ({"steps": 10}, {"steps": 1000}, {})))
    step_s = short["step_time_s"]["median"]
    assert short["length_s"]["median"] == pytest.approx(10 * step_s)
    assert long["length_s"]["median"] == pytest.approx(1000 * step_s)
    assert "length_s" not in unknown


def test_features_answer_like_the_catalog() -> None:
    given = {"id": 7, "features": msgspec.to_builtins(vgg11()), "training": SGD, "gpu": "A100-SXM4-40GB"}
    one, other = ask(row(), given)
    assert other["id"] == 7
    assert {**one, "id": 0, "elapsed_s": 0} == {**other, "id": 0, "elapsed_s": 0}


@pytest.mark.parametrize(
    ("bad", "id_", "word"),
    [
        pytest.param(b"{", None, "BadRow", id="no JSON"),
        pytest.param(b"\xff\xfe", None, "BadRow", id="no text"),
        pytest.param(b"[]", None, "BadRow", id="a list"),
        pytest.param({"id": "x", "gpu": "T4"}, "x", "of catalog and features, found neither", id="no model"),
        pytest.param({"id": "x", "catalog": {"name": "timm/vgg11"}}, "x", "gpu", id="no GPU"),
        pytest.param(row("x", features={}), "x", "BadRow", id="broken features"),
        pytest.param(row("x", gpu="Voodoo2"), "x", "known products", id="unknown GPU"),
        pytest.param(row("x", gpu="A100"), "x", "ambiguous", id="ambiguous GPU"),
        pytest.param(row("x", training={"batchSize": 0}), "x", "training.batchSize: expected a whole number >= 1",
                     id="batch of 0"),
        pytest.param(row("x", training={"batchSize": 10**9}), "x", "<= 1000000", id="batch of a billion"),
        pytest.param(row("x", training={"optimizer": "adamw_torch_fused"}), "x",
                     "found 'adamw_torch_fused'; the nearest is adamw-fused", id="unknown optimizer"),
        pytest.param(row("x", "timm/nonsense"), "x", "UnknownCatalogModel", id="unknown model"),
        pytest.param(row("x", surprise=1), "x", "unknown field surprise", id="unknown field"),
        pytest.param(row("x", training={"batch_size": 16}), "x", "training: object contains unknown field batch_size",
                     id="unknown field of training"),
        pytest.param(b'{"training": {"batchSize": 0}, no', None, "training.batchSize: expected", id="then no JSON"),
        pytest.param(b'{"id": "x", "training": {"batchSize": 0}, "training": {}}', "x", ">= 1", id="repeated key"),
        pytest.param(b'{"id": "x", "y": ' + 99_999 * b"[", None, "unknown field y", id="nested without end"),
        pytest.param(row("x", training=7), "x", "training: expected a mapping, got a whole number", id="no object"),
        pytest.param(row("x", catalog={"name": "timm/a", "input": [3, -1]}), "x",
                     "catalog.input[1]: expected a whole number >= 1", id="in a list"),
    ],
)  # fmt: skip
def test_a_bad_row_is_an_error_line_and_others_go_on(bad: Any, id_: str | None, word: str) -> None:
    before, answer, after = ask(row("before"), bad, row("after"))
    assert (before["id"], before["status"], after["id"], after["status"]) == ("before", "ok", "after", "ok")
    assert set(answer) == KEYS
    assert (answer["id"], answer["status"]) == (id_, "error")
    assert word in f"{answer['reason']}: {answer['message']}"
    assert answer["memory"] is answer["activity"] is answer["step_time_s"] is None


def test_an_untraceable_model_is_an_abstention() -> None:
    (answer,) = ask(row(name="timm/slow"))
    assert answer["status"] == "abstained"
    assert (answer["reason"], answer["message"]) == ("TraceTimedOut", "took longer than 120 s; give features")


def test_a_model_that_the_store_lacks_is_traced_once() -> None:
    tracer = FakeTracer()
    answers = ask(*(row(i, "timm/new") for i in range(5)), row(5, "timm/new", gpu="T4"), tracer=tracer)
    assert [answer["status"] for answer in answers] == ["ok"] * 6
    assert len(tracer.asked) == 1
    assert answers[0]["elapsed_s"] >= 7, "the row whose model was traced"
    assert all(answer["elapsed_s"] < 7 for answer in answers[1:]), "and no other"


def test_a_model_of_the_store_is_not_traced() -> None:
    tracer = FakeTracer()
    (answer,) = ask(row(), tracer=tracer)
    assert (answer["status"], tracer.asked) == ("ok", [])


def test_a_batch_beyond_the_store_is_traced() -> None:
    tracer = FakeTracer()
    (answer,) = ask(row(training={**SGD, "batchSize": 100_000}), tracer=tracer)
    assert tracer.asked[0].training.batch_size == 100_000
    assert answer["reason"] == "BatchOutOfRange"


def test_rows_and_json_have_one_shape() -> None:
    """A row's answer has the fields of an entry of products, without the largest batches."""
    (answer,) = ask(row(training={**SGD, "steps": 10}))
    job = prepare(vgg11(), msgspec.structs.replace(TRAINING, steps=10))
    report = json.loads(msgspec.json.encode(as_json(report_on("a", job, [A100]))))
    (entry,) = report.pop("products")
    entry = {name: value for name, value in entry.items() if name not in ("largest_batch", "mig")}
    assert {**report, **entry} == {name: value for name, value in answer.items() if name != "elapsed_s"}
    abstained = Abstention(reason="CatalogUnsupported", message="no such library")
    assert as_json(report_on("a", abstained, [A100]))["status"] == "error"


@settings(deadline=None)  # wall-clock time varies on a shared machine
@given(st.binary())
def test_any_line_gets_an_answer(line: bytes) -> None:
    (answer,) = ask(line)
    assert set(answer) == KEYS


def test_several_processes_answer_in_order() -> None:
    asked = b"".join(json.dumps(row(i)).encode() + b"\n" for i in range(MAX_SINGLE_PROCESS + 300))
    read_bytes: list[int] = []
    out = io.BytesIO()
    tally = predict_rows(io.BytesIO(asked), out, TraceLimits(), lambda _, taken: read_bytes.append(taken), workers=2)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [answer["id"] for answer in answers] == list(range(MAX_SINGLE_PROCESS + 300))
    assert tally == {"ok": MAX_SINGLE_PROCESS + 300}
    assert sum(read_bytes) == len(asked)


def test_a_killed_worker_is_an_error() -> None:
    asked = b"".join(json.dumps(row(i)).encode() + b"\n" for i in range(20 * MAX_SINGLE_PROCESS))
    out = io.BytesIO()

    def end_them(*_: object) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(WorkerDied, match="worker process was killed"):
        predict_rows(io.BytesIO(asked), out, TraceLimits(), end_them, workers=2)
    assert [json.loads(line)["id"] for line in out.getvalue().splitlines()][:3] == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_use_the_calibration(workers: int) -> None:
    stack = Stack(product="Tesla T4", precision=Precision.FP32, driver="570.1", torch="2.9")
    learned = Calibration()
    for size in range(1000, 9000, 400):
        expected = RunPrediction(model=f"m{size}", reserved_mib=size, live_mib=size / 2, upper_mib=15000)
        learned = observe(learned, stack, expected, RunMeasurement(peak_mib=1.5 * size, capacity_mib=15360), shipped())
    asked = b"".join(
        json.dumps(row(i, gpu="T4")).encode() + b"\n" for i in range(MAX_SINGLE_PROCESS + 1 if workers > 1 else 1)
    )
    out = io.BytesIO()
    predict_rows(io.BytesIO(asked), out, TraceLimits(), lambda *_: None, workers, calibration=learned)
    (plain,), answer = ask(row(gpu="T4")), json.loads(out.getvalue().splitlines()[-1])
    memory = predict_on(vgg11(), TRAINING, [find_product("T4")], learned).products[0].memory
    assert (answer["memory"]["median_mib"], answer["memory"]["upper_mib"]) == (memory.median_mib, memory.upper_mib)
    assert answer["memory"] != plain["memory"]


def test_the_command_writes_answers_and_counts_errors(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "predictions.jsonl"
    rows.write_text("\n".join(json.dumps(r) for r in (row("a"), row("b", gpu="Voodoo2"), row("c"))) + "\n\n")
    result = CliRunner().invoke(predict, ["--rows", str(rows), "--out", str(out)])
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", "b", "c"]
    assert result.exit_code == 2
    assert "1 of 3 rows" in result.stderr
    assert "3 rows (1 error, 2 ok)" in result.stderr
    rows.write_text(json.dumps(row("a")))
    result = CliRunner().invoke(predict, ["--rows", str(rows)])
    assert (result.exit_code, json.loads(result.stdout)["id"]) == (0, "a")


ROWS, CHECKPOINTS = ["--rows", "rows.jsonl"], ["--activation-checkpointing"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param([], "found neither", id="nothing"),
        pytest.param(["timm/resnet50", *ROWS], "found both", id="both"),
        pytest.param(["--rows", "absent.jsonl"], "cannot read", id="no such file"),
        pytest.param([*ROWS, "--calibration", "broken.json"], "expected a calibration", id="malformed calibration"),
        *(
            pytest.param([*ROWS, *of_a_row], f"expected no {of_a_row[0]} with --rows", id=of_a_row[0])
            for of_a_row in (["--gpu", "T4"], ["--json"], ["--batch-size", "32"], ["--input", "3,224,224"], CHECKPOINTS)
        ),
    ],
)
def test_wrong_arguments_are_a_sentence_and_exit_code_2(
    arguments: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(row("a")))
    Path("broken.json").write_text("{")
    result = CliRunner().invoke(predict, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert word in result.stderr


@pytest.mark.parametrize("link", [None, Path.symlink_to, Path.hardlink_to])
def test_rows_are_never_overwritten_by_their_answers(link: Callable[[Path, Path], None] | None, tmp_path: Path) -> None:
    """Regression: the file was emptied before it was read."""
    rows = out = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("a")))
    if link is not None:
        out = tmp_path / "out.jsonl"
        link(out, rows)
    result = CliRunner().invoke(predict, ["--rows", str(rows), "--out", str(out)])
    assert result.exit_code == 2
    assert "expected another file" in result.stderr
    assert rows.read_text() == json.dumps(row("a"))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_refused(content: str, tmp_path: Path) -> None:
    """Regression: earlier answers were emptied before the rows were read."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "predictions.jsonl"
    rows.write_text(content)
    out.write_text("earlier answers")
    result = CliRunner().invoke(predict, ["--rows", str(rows), "--out", str(out)])
    assert out.read_text() == "earlier answers"
    assert result.exit_code == 2
    assert result.stderr == f"Error: expected rows in {rows}, one JSON object a line, found none\n"
