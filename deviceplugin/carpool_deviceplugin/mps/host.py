"""A process of its own for the MPS daemons, so that they outlive the agent: a container's processes end with it.

The agent names a GPU on a Unix socket, and is told whether its daemon runs; it asks and stops the daemon itself. One
that does not answer is ended here: the agent may have no right to. Who has hung up is not obeyed: it has asked again
since, or wants something else. What they say to each other stays as it is, and words may be added: the agent beside
this process may be of any later version.
"""

import errno
import os
import selectors
import socket
import socketserver
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from carpool_core.values import GpuUuid

from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.mps.daemons import Mps
from carpool_deviceplugin.mps.leftovers import MOMENT_S
from carpool_deviceplugin.mps.port import MpsCommands, MpsError

_WITHIN_S = 8.0
_TURN_WITHIN_S = 5.0
"""For an earlier request; less than an answer is waited for, so that who asks is told."""
_LONGEST = 4096
_END = "end "
"""Before a GPU's name: its daemon and servers shall be ended."""
_TIDY = "tidy "
"""Before a GPU's name: what clients left shall be removed where no daemon runs."""


class UntidiedError(MpsError):
    """A daemon has stopped, but its host did not remove what clients left in the memory that they shared with it."""


class _AwayError(MpsError):
    """There is no host."""


class _UnknownError(MpsError):
    """It is of an earlier version, and does not know the word."""


class _Answer(msgspec.Struct, frozen=True):
    error: str = ""
    is_understood: bool = False
    """Whether the host knows the word that was said; the first versions know few, and do not say so."""


class HostedMps(Mps):
    """Daemons that another process starts.

    Args:
        commands: Of NVIDIA's program.
        directory: Where each GPU has a directory of its own.
        host: Socket of the process that starts them.
        may_write: As of Mps.
        within_s: How long an answer may take, in seconds.
        tidy_within_s: As of Mps.
    """

    def __init__(
        self,
        commands: MpsCommands,
        directory: Path,
        host: Path,
        *,
        may_write: bool = True,
        within_s: float = _WITHIN_S,
        tidy_within_s: float = MOMENT_S,
    ) -> None:
        super().__init__(commands, directory, may_write=may_write, tidy_within_s=tidy_within_s)
        self._host, self._within_s = host, within_s
        self._log = structlog.get_logger()

    def start(self, uuid: GpuUuid) -> None:
        """Let a GPU's daemon be started, and see that it answers."""
        self.directory(uuid)  # a name that is no UUID goes no further
        self._tell(uuid, uuid)

    def stop(self, uuid: GpuUuid) -> None:
        """Stop a GPU's daemon; what clients left in its shared memory only its host can remove.

        Raises:
            UntidiedError: The host did not. An earlier request of that GPU may go on, and start a daemon.
            MpsError: As of Mps; so OSError.
        """
        super().stop(uuid)
        try:
            self._tell(uuid, f"{_TIDY}{uuid}")
        except (_AwayError, _UnknownError) as e:  # its daemons have gone with it; or it does so before the next start
            self._log.warning("what mps clients left stays until the gpu's next daemon", gpu=uuid, reason=str(e))
        except MpsError as e:
            raise UntidiedError(
                f"GPU {uuid}: expected what the clients of its MPS daemon left to be removed, found the daemon stopped,"
                f" and of its host: {e}; the agent tries again"
            ) from e

    def end(self, uuid: GpuUuid) -> None:
        """Let a GPU's daemon and its servers be ended."""
        self.directory(uuid)
        self._tell(uuid, f"{_END}{uuid}")

    def _tell(self, uuid: GpuUuid, what: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._within_s)
                connection.connect(str(self._host))
                connection.sendall(f"{what}\n".encode())
                answer = msgspec.json.decode(connection.makefile("rb").readline(_LONGEST), type=_Answer)
        except (OSError, msgspec.DecodeError) as e:
            is_away = isinstance(e, FileNotFoundError | ConnectionRefusedError)
            raise (_AwayError if is_away else MpsError)(
                f"GPU {uuid}: expected the MPS daemons' host at {self._host}, found {e}; look at the pod carpool-mps"
            ) from e
        if answer.error:
            raise (MpsError if answer.is_understood else _UnknownError)(answer.error)


class _Handler(socketserver.StreamRequestHandler):
    timeout = 5.0

    def handle(self) -> None:
        """Start or end the daemon of the GPU that is named."""
        server = self.server
        assert isinstance(server, MpsHost)  # noqa: S101  # socketserver knows no types
        said = self.rfile.readline(_LONGEST).decode(errors="replace").strip()
        error = server.obey(said, lambda: _has_hung_up(self.connection))
        with suppress(ConnectionError):
            self.wfile.write(msgspec.json.encode(_Answer(error[: _LONGEST // 2], is_understood=True)) + b"\n")


def _has_hung_up(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        if not selector.select(0):
            return False
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _make_room(path: Path) -> None:
    """Remove the socket of a host that is gone, and nothing else; raises OSError."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "something that is no socket", str(path))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_TURN_WITHIN_S)
            asking.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink()
        return
    raise FileExistsError(errno.EADDRINUSE, "another host that answers there", str(path))


class MpsHost(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Starts daemons for whoever may open its socket, which is root alone.

    Args:
        path: Of the socket.
        mps: The daemons.
        within_s: How long one request waits for another of the same GPU, in seconds.

    Raises:
        OSError: The socket cannot be made; something else, or a host that answers, is never replaced.
    """

    daemon_threads = True
    request_queue_size = 128
    """The GPUs of a node may all want their daemons at once."""

    def __init__(self, path: Path, mps: Mps, *, within_s: float = _TURN_WITHIN_S) -> None:
        self._mps, self._within_s = mps, within_s
        self._locks: dict[str, threading.Lock] = {}
        self._log = structlog.get_logger()
        _make_room(path)
        before = os.umask(0o177)
        try:
            super().__init__(str(path), _Handler)
        finally:
            os.umask(before)

    def obey(self, said: str, has_hung_up: Callable[[], bool]) -> str:
        """Start a GPU's daemon, or take over the one that runs; or end it, or tidy up after it.

        Args:
            said: What, and of which GPU.
            has_hung_up: Whether nobody waits for the answer any more; asked when it is this one's turn.

        Returns:
            Why not, or an empty text.
        """
        word = next((word for word in (_END, _TIDY) if said.startswith(word)), "")
        uuid = GpuUuid(said.removeprefix(word))
        what, act = {
            _END: ("ended", self._mps.end),
            _TIDY: ("tidied", self._mps.tidy),
        }.get(word, ("runs", self._mps.start))
        try:
            if not self._one_by_one(uuid, act, has_hung_up):
                self._log.info("mps daemon left alone: who asked has hung up", gpu=uuid, wanted=what)
                return ""
        except (DeviceError, OSError) as e:
            self._log.warning(f"mps daemon not {what}", gpu=uuid[:64], error=str(e))
            return str(e)
        self._log.info(f"mps daemon {what}", gpu=uuid)
        return ""

    def _one_by_one(self, uuid: GpuUuid, act: Callable[[GpuUuid], None], has_hung_up: Callable[[], bool]) -> bool:
        self._mps.directory(uuid)  # only names of GPUs get locks
        lock = self._locks.setdefault(uuid, threading.Lock())
        if not lock.acquire(timeout=self._within_s):  # whoever waits for ever has hung up long ago
            raise MpsError(f"GPU {uuid}: an earlier request goes on; look at its daemon on the node")
        try:
            if has_hung_up():
                return False
            act(uuid)
        finally:
            lock.release()
        return True
