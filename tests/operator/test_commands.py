"""`carpool operator`, as far as it gets with what it was told."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from carpool_operator.commands import operator
from click.testing import CliRunner


class _Empty(BaseHTTPRequestHandler):
    """A cluster that knows our resources, and holds none."""

    def do_GET(self) -> None:
        body = b'{"metadata":{"resourceVersion":"1"},"items":[]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name
        """Be silent."""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    """A file that leads to such a cluster."""
    server = HTTPServer(("127.0.0.1", 0), _Empty)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    path = tmp_path / "kubeconfig"
    path.write_text(
        '{"current-context":"c","contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"clusters":[{"name":"c",'
        f'"cluster":{{"server":"http://127.0.0.1:{server.server_port}"}}}}],"users":[{{"name":"u","user":{{"token":"t"}}}}]}}'
    )
    yield path
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--metrics-port", "{taken}"], "CARPOOL_METRICS_PORT: expected a free port at 0.0.0.0, found {taken}: "),
        (["--metrics-port", "-1"], "expected a number from 0 to 65535, found -1"),
        (["--workers", "0"], "expected a number from 1 on, found 0"),
        (["--traces", "-1"], "expected a number from 1 on, found -1"),
        (["--trace-timeout-seconds", "nan"], "expected a number from 1 to 86400, found nan"),
        (["--backoff-seconds", "inf"], "expected a number from 0 to 86400, found inf"),
        (["--calibration", "x"], "CARPOOL_CALIBRATION: expected NAMESPACE/NAME of a ConfigMap, or nothing, found 'x'"),
        (["--kubeconfig", "/nowhere"], "expected a kubeconfig at /nowhere, found none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_what_cannot_work(
    kubeconfig: Path, taken: int, arguments: list[str], expected: str
) -> None:
    """Regression: a port that was taken, and numbers that make no sense, were tracebacks."""
    given = [part.format(taken=taken) for part in arguments]
    result = CliRunner().invoke(operator, ["--kubeconfig", str(kubeconfig), "--metrics-port", "0", *given])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert expected.format(taken=taken) in result.output
