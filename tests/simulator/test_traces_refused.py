"""Traces and cluster files that nobody could simulate: refused with what was expected, what was found, and where."""

import pytest
from carpool_simulator.philly import read_cluster, read_trace
from carpool_simulator.truth import WorkloadError


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("timestamp,duration\n1,2\n", "expected the columns timestamp, duration, num_gpus, found timestamp, duration"),
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
            "timestamp,duration,num_gpus,duration\n1,2,1,3\n",
            "expected each of the columns .* once, found timestamp, duration, num_gpus, duration; keep one duration",
        ),
        (
            "timestamp,duration,num_gpus\n2026-01-31 12:00:00,2,1\n500,2,1\n",
            "line 3: expected a time in ISO 8601 as on line 2, found 500; write all times alike",
        ),
        (
            "timestamp,duration,num_gpus\n500,2,1\n2026-01-31 12:00:00,2,1\n",
            "line 3: expected seconds as on line 2, found 2026-01-31 12:00:00",
        ),
        ("timestamp,duration,num_gpus\n", "expected at least one job, found none"),
        ("", "found none; add timestamp, duration, num_gpus"),
        (
            "Timestamp,Duration,Num_GPUs\n1,2,1\n",
            'found Timestamp, Duration, Num_GPUs; rename "Timestamp" to timestamp, "Duration" to duration, "Num_GPUs" '
            "to num_gpus$",
        ),
        ("timestamp, duration\n1,2\n", 'rename " duration" to duration, and add num_gpus$'),
        (
            "timestamp;duration;num_gpus\n1;2;1\n",
            "found timestamp;duration;num_gpus; separate by commas what semicolons separate$",
        ),
        ("Timestamp\tduration\tnum_gpus\n1\t2\t1\n", "; separate by commas what tabs separate$"),
        (b"\xff\xfe\x00", "expected CSV in UTF-8"),
        (None, "found no file; look at the path that --trace names, or"),
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
        ("nodes: [{product: Tesla T4, count: -1}]", r"nodes\[0\].count: expected a whole number >= 1, found -1"),
        ("nodes: [{product: Tesla T4, gpus: 0}]", "expected a whole number >= 1, found 0; write `nodes: "),
        ("nodes: [{product: Tesla T4, gpus: x}]", r"nodes\[0\].gpus: expected a whole number, found a text"),
        ("nodes: 3", "nodes: expected a list, found a whole number"),
        ("", "expected a mapping, found nothing"),
        ("nodes: [{gpus: 3}]", r"nodes\[0\]: expected the field product, found none"),
        ("nodes: [{product: Tesla T4, cpus: 3}]", r"nodes\[0\]: expected only the fields that are known, found cpus"),
        ("nodes: []", "expected at least one node, found none"),
        (
            "nodes: [{product: Tesla T4, count: 1, count: 2}]",
            "expected each field once, found count on line 1 and again on line 1; keep one of them, as in `nodes: ",
        ),
        (
            "nodes: [{product: Tesla T4}]\n\nnodes: [{product: NVIDIA A10}]\n",
            "expected each field once, found nodes on line 1 and again on line 3",
        ),
        ("gpus: 3", "found gpus; write `nodes: "),
        ("a:\n  b: c: d", "expected YAML in UTF-8, found what is none near line 2; write `nodes: "),
        ("nodes: 2020-99-99", "expected YAML in UTF-8, found something else"),
        (b"\xff\xfe\x00", "expected YAML in UTF-8, found something else"),
        (None, "expected a cluster file at .*, found no file; look at the path that --cluster names"),
    ],
)
def test_a_bad_cluster_file_shows_what_was_expected(tmp_path, text, sentence):
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(WorkloadError, match=sentence) as caught:
        read_cluster(path)
    for theirs in ("`int`", "- at `$", "Errno", "byte string"):
        assert theirs not in str(caught.value)


def test_a_column_that_no_job_needs_may_stand_twice_and_nodes_may_be_repeated_by_an_alias(tmp_path):
    (tmp_path / "t.csv").write_text("timestamp,user,duration,num_gpus,user\n0,a,60,1,b\n")
    assert [one.duration_s for one in read_trace(tmp_path / "t.csv").jobs] == [60.0]
    (tmp_path / "c.yaml").write_text("nodes:\n- &one {product: Tesla T4, gpus: 2}\n- *one\n")
    assert [len(devices) for devices in read_cluster(tmp_path / "c.yaml").values()] == [2, 2]
