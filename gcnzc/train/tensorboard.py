"""Write the numbers of a run to an event file of TensorBoard, without a thread of its own.

The writers of torch and TensorBoard write in a thread, whose errors they print as a traceback. An
event file is a sequence of records, which TensorBoard's own encoder makes here.
"""

import importlib.util
import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gcnzc.train.record import Journal


class EventFile:
    """The event file of this process in a folder; nothing is written without TensorBoard.

    Args:
        folder: of the event files.
        say: called with a message if TensorBoard is installed, but cannot be imported.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self.is_available = importlib.util.find_spec("tensorboard") is not None
        self.say = say
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.0"
        self.folder, self._journal = folder, Journal(folder / name)
        self._has_begun = False

    def add(self, step: int, line: Mapping[str, Any]) -> None:
        """Add the numbers of `line` to the pending events, at `step`.

        The events of earlier processes are hidden from the first `step` on.
        """
        if not self.is_available:
            return
        if not self._has_begun:
            try:
                self._journal.pending += _head(step)
            except Exception as error:  # a broken package raises anything, and must not end the run
                self.is_available = False
                self.say(
                    f"warning: no events are written: TensorBoard does not import: {error!r:.200}"
                )
                return
            self._has_begun = True
        self._journal.pending += _events(step, line)

    def append(self) -> None:
        """Append all pending events to the file.

        Raises:
            OSError: the disk is full or may not be written. The events remain pending.
        """
        if self._journal.pending:
            self.folder.mkdir(exist_ok=True)
            self._journal.append()


def _head(first_step: int) -> bytes:
    """Return the version record, and a record that hides earlier events from `first_step` on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    log = SessionLog(status=SessionLog.START)
    return _record(Event(wall_time=time.time(), file_version="brain.Event:2")) + _record(
        Event(wall_time=time.time(), step=first_step, session_log=log)
    )


def _events(step: int, line: Mapping[str, Any]) -> bytes:
    """Return one event with all numbers of `line`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=name, simple_value=float(value))
        for name, value in line.items()
        if isinstance(value, int | float)
    ]
    return _record(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def _record(event: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    RecordWriter(data).write(event.SerializeToString())
    return data.getvalue()
