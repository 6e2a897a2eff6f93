"""The program that measures what people train, on the processor: its rows, and that its steps train."""

import csv
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import click.testing
import pytest
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer, Precision
from carpool_research import finetuning
from carpool_research.finetuning import KINDS, Measured, answers, training_step
from carpool_research.published import OWN, Case, read_cases

GPT2 = "transformers/GPT2Config@n_embd=32,n_layer=1,n_head=2,vocab_size=1000"


def case(name: str, **training: object) -> Case:
    model = CatalogModel(name=name, input=[16] if name == GPT2 else [3, 64, 64])
    spec = Training(**{"batch_size": 2, "optimizer": Optimizer.ADAMW, **training})
    return Case("a", "carpool", "process", model, spec, "NVIDIA H200", None, None, "")


@pytest.mark.parametrize(
    "one",
    [
        case(GPT2, precision=Precision.BF16, activation_checkpointing=True, gradient_accumulation=2),
        case(GPT2, optimizer=Optimizer.ADAFACTOR),
        case("timm/resnet10t", precision=Precision.BF16_MIXED, optimizer=Optimizer.SGD_MOMENTUM),
    ],
    ids=["causal language model", "adafactor", "image model"],
)
def test_a_step_changes_the_weights(one: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Sequence[object]] = []
    optimizer = finetuning._optimizer

    def spied(of: Case, weights: Sequence[object]) -> object:
        kept.append(weights)
        return optimizer(of, weights)

    monkeypatch.setattr(finetuning, "_optimizer", spied)
    step = training_step(one, "cpu")
    before = [weight.detach().clone() for weight in kept[0]]
    step()
    assert any((old != new).any() for old, new in zip(before, kept[0], strict=True))


def fail(connection: Connection, _: Case) -> None:
    connection.send("OutOfMemoryError: no room")


def end(_: Connection, __: Case) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("work", "reason"), [(fail, "OutOfMemoryError: no room"), (end, "the process ended with code 3")]
)
def test_a_failed_case_is_a_reason(work, reason: str) -> None:
    one = case(GPT2)
    assert list(answers([one], work)) == [(one, reason)]


def test_each_kind_of_peak_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(
        allocated=10.2, reserved=20, process=30, step_time_s=0.1234567, gpu="NVIDIA H200", torch="2.11.0"
    )
    chosen = OWN.read_text(encoding="utf-8").splitlines()[:4]
    (given := tmp_path / "cases.csv").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    monkeypatch.setattr(finetuning, "answers", lambda cases: ((one, measured) for one in cases))
    asked = [str(given), "--out", str(out := tmp_path / "rows.csv")]
    done = click.testing.CliRunner().invoke(finetuning.finetuning, asked)
    assert done.exit_code == 0, done.output
    found = {one.kind: one for one in read_cases(out)}
    assert list(found) == list(KINDS)
    assert [one.memory_mib for one in found.values()] == [10, 20, 30]
    assert [one.step_time_s for one in found.values()] == [None, None, 0.1235]
    with out.open(newline="", encoding="utf-8") as file:
        assert {row["note"] for row in csv.DictReader(file)} == {"torch 2.11.0"}
