"""`carpool simulate` with a trace of the user: assumptions, queue order, declared steps."""

from dataclasses import replace

import pytest
from carpool_extender.queue.order import QueueOrder
from carpool_simulator.commands import simulate
from carpool_simulator.philly import DECLARED, LEARNED, PREDICTED, SILENT, UNLEARNED, from_trace, read_cluster
from carpool_simulator.sweep import ARRIVAL, DEFAULT, LONGEST_FIRST
from carpool_simulator.truth import WorkloadError
from click.testing import CliRunner


@pytest.fixture
def own(data):
    """Eleven jobs within ten seconds on two GPUs; the first one is the last line."""
    lines = [*(f"{at_s},600,1" for at_s in range(1, 11)), "0,600,1"]
    (data / "t.csv").write_text("\n".join(["timestamp,duration,num_gpus", *lines, ""]))
    (data / "c.yaml").write_text("nodes: [{product: NVIDIA GeForce RTX 3090, gpus: 2}]")
    return data


def run(own, *arguments):
    """Return the output and the document."""
    files = ["--trace", str(own / "t.csv"), "--cluster", str(own / "c.yaml"), "--no-pictures"]
    result = CliRunner().invoke(simulate, ["--data", str(own), "--out", str(own / "out"), *files, *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split()), (own / "out" / "trace.md").read_text()


def test_without_measurements_jobs_behave_as_predicted(own, monkeypatch):
    monkeypatch.delenv("CARPOOL_DATA", raising=False)
    files = ["--trace", str(own / "t.csv"), "--cluster", str(own / "c.yaml"), "--no-pictures"]
    result = CliRunner().invoke(simulate, ["--out", str(own / "out"), *files])
    assert result.exit_code == 0, result.output
    written = (own / "out" / "trace.md").read_text()
    assert PREDICTED[1] in written
    carpool = next(row for row in written.splitlines() if row.startswith("| Carpool"))
    assert [cell.strip() for cell in carpool.split("|")][-4] == "0.0", "no job runs out of memory"


def test_cluster_is_what_kubectl_prints_of_gpunodes(tmp_path):
    """Only healthy GPUs count, with the modes and the memory that their agent reports."""
    file = tmp_path / "gpus.yaml"
    file.write_text(
        "kind: List\nitems:\n- {kind: GpuNode, metadata: {name: a}, status: {devices: ["
        "{uuid: GPU-1, index: 0, product: Tesla T4, memoryMib: 15360, health: Healthy, modes: [Exclusive]},"
        "{uuid: GPU-2, index: 1, product: Tesla T4, memoryMib: 15360, health: Unhealthy, modes: [Exclusive]}]}}\n"
        "- {metadata: {name: b}}\n"
    )
    ((name, (gpu,)),) = read_cluster(file).items()
    assert (name, gpu.uuid, gpu.memory_mib) == ("a", "GPU-1", 15360)
    for text, message in (
        ("items: []", "expected at least one healthy GPU"),
        (file.read_text().replace("Tesla T4", "Tesla X9"), "Tesla X9"),
        ("items: [{metadata: {name: a}, status: {devices: 7}}]", "expected"),
        (file.read_text().replace("name: b", "name: a"), "node name and GPU UUID once, found a again"),
        (file.read_text().replace("GPU-2", "GPU-1"), "found GPU-1 again"),
    ):
        file.write_text(text)
        with pytest.raises(WorkloadError, match=message):
            read_cluster(file)


@pytest.mark.parametrize(("arguments", "sentence"), [([], UNLEARNED), (["--learn"], LEARNED)], ids=["no", "learned"])
def test_table_says_whether_jobs_were_learned_from(own, arguments, sentence):
    _, written = run(own, *arguments)
    assert f"- {sentence}" in written


@pytest.mark.parametrize(
    ("order", "sentence", "line"),
    [
        (
            "Alternate",
            "alternate (`settings.queueOrder: Alternate`, the default). A job that declares no steps",
            DEFAULT,
        ),
        ("Arrival", "orders jobs by arrival (`settings.queueOrder: Arrival`).", ARRIVAL),
        (
            "LongestFirst",
            "longest job first (`settings.queueOrder: LongestFirst`). A job that declares no steps",
            LONGEST_FIRST,
        ),
    ],
)
def test_table_names_the_queue_order(own, order, sentence, line):
    for arguments, named in (([], line), (["--policies", "exclusive,best-fit"], "best-fit")):
        _, written = run(own, "--queue-order", order, *arguments)
        paragraph = written.split("\n\n")[1]
        assert sentence in paragraph
        assert paragraph.count("settings.queueOrder") == 1
        assert f"| {named} |" in written


def test_queue_order_matters_only_for_jobs_that_declare_steps(own):
    """Regression: no order could be tried, because jobs of a trace declare no steps."""
    lines = [f"{900 * number},{3600 * hours},1" for number, hours in enumerate((1, 90, 3, 45, 10, 20))]
    (own / "t.csv").write_text("\n".join(["timestamp,duration,num_gpus", "0,9e4,1", "0,9e4,1", *lines, ""]))

    def rows(order, *arguments):
        _, written = run(own, "--policies", "exclusive", "--queue-order", order, *arguments)
        assert (f"- {DECLARED}" in written, f"- {SILENT}" in written) == (bool(arguments), not arguments)
        return next(row for row in written.splitlines() if row.startswith("| exclusive |"))

    orders = [one.value for one in QueueOrder]
    assert len({rows(order) for order in orders}) == 1
    assert rows("Arrival", "--steps") == rows("Arrival")
    assert rows("LongestFirst", "--steps") != rows("Arrival")


def test_declared_steps_are_the_duration_over_the_step_time(own):
    nodes = read_cluster(own / "c.yaml")
    silent, declared = (from_trace(own, own / "t.csv", nodes, 0, has_steps=one) for one in (False, True))
    assert {one.steps for one in silent.jobs} == {None}
    assert [one.steps for one in declared.jobs] == [round(600 / (32 / 100))] * 11, "32 samples a step, 100 a second"
    assert [replace(one, steps=None) for one in declared.jobs] == silent.jobs, "otherwise the trace is the same"
