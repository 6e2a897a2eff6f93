"""Invalid traces and cluster files are refused with the expectation, the value found, and its place."""

import pytest
from carpool_simulator.philly import read_cluster, read_trace
from carpool_simulator.truth import WorkloadError


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("timestamp,duration\n1,2\n", "num_gpus separated by commas, found timestamp, duration"),
        ("timestamp,duration,num_gpus\n1,-2,1\n", "line 2: expected a duration from 0 to .*, found -2 s"),
        ("timestamp,duration,num_gpus\n1,nan,1\n", "line 2: expected a duration from 0"),
        ("timestamp,duration,num_gpus\n1,1e300,1\n", "line 2: expected a duration from 0 to 1e.09 s"),
        ("timestamp,duration,num_gpus\n1,1,0\n", "line 2: .* on 1 GPU or more, found 1 s on 0"),
        (
            "timestamp,duration,num_gpus\nx,2,1\n",
            "line 2: expected a time .* found timestamp x, duration 2, num_gpus 1",
        ),
        ("timestamp,duration,num_gpus\nnan,2,1\n", "line 2: .* found timestamp nan, duration 2, num_gpus 1"),
        ("timestamp,duration,num_gpus\n1,2\n", "line 2: .* found timestamp 1, duration 2, num_gpus nothing"),
        ("timestamp,duration,num_gpus\n1,2,1.5\n", "line 2: .* a whole number of GPUs, found .* num_gpus 1.5"),
        (
            "timestamp,duration,num_gpus\n2026-01-31 12:00:00,2,1\n500,2,1\n",
            "line 3: expected a time in ISO 8601 as on the lines before, found 500; use one format for all times",
        ),
        (
            "timestamp,duration,num_gpus\n500,2,1\n2026-01-31 12:00:00,2,1\n",
            "line 3: expected seconds as on the lines before, found 2026-01-31 12:00:00",
        ),
        ("timestamp,duration,num_gpus\n", "expected at least one job, found none"),
        ("", "found none; add or rename timestamp, duration, num_gpus"),
        (
            "timestamp;duration;num_gpus\n1;2;1\n",
            "expected the columns .* separated by commas, found timestamp;duration;num_gpus; add or rename timestamp,",
        ),
        (b"\xff\xfe\x00", "expected CSV in UTF-8"),
        (None, "found: No such file or directory; check the path of --trace, or"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, text, sentence):
    path = tmp_path / "t.csv"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(WorkloadError, match=sentence):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nodes: [{product: Voodoo}]", "'Voodoo' is unknown; known products: "),
        ("nodes: [{product: A100}]", "is ambiguous"),
        ("nodes: [{product: Tesla T4, count: -1}]", r"nodes\[0\].count: expected a whole number >= 1"),
        ("nodes: [{product: Tesla T4, gpus: 0}]", "expected a whole number >= 1; write `nodes: "),
        ("nodes: [{product: Tesla T4, gpus: x}]", r"nodes\[0\].gpus: expected a whole number, got a text"),
        ("nodes: 3", "nodes: expected array, got a whole number"),
        ("", "expected a mapping, got null"),
        ("nodes: [{gpus: 3}]", r"nodes\[0\]: object missing required field product"),
        ("nodes: [{product: Tesla T4, cpus: 3}]", r"nodes\[0\]: object contains unknown field cpus"),
        ("nodes: []", "expected at least one node, found none"),
        ("gpus: 3", "contains unknown field gpus; write `nodes: "),
        ("a:\n  b: c: d", "expected YAML in UTF-8, found: .* line 2, .*; write `nodes: "),
        ("nodes: 2020-99-99", "expected YAML in UTF-8, found: "),
        (b"\xff\xfe\x00", "expected YAML in UTF-8, found: "),
        (None, "expected a cluster file at .*, found: No such file or directory; check the path of --cluster"),
    ],
)
def test_a_bad_cluster_file_shows_what_was_expected(tmp_path, text, sentence):
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(WorkloadError, match=sentence):
        read_cluster(path)
