"""Everything private in TensorBoard that batchscope touches, as read in tensorboard 2.21: a writer's file."""

import os
from typing import Any

from .files import whole_append


def append_to_event_file(file_writer: Any, records: bytes) -> bool:
    """Append finished records to the file of a torch `FileWriter`, behind everything that it was given before.

    TensorBoard's writer takes one event at a time: a thread computes its checksum in Python, and opens and closes the
    file. Returns False, and writes nothing, for a writer of another kind, one that is closed, and a file system without
    appending. If a local file cannot take all records (OSError), it has none of them.
    """
    try:
        writer = file_writer.event_writer._async_writer
        lock, closed, queue, file = writer._lock, writer._closed, writer._byte_queue, writer._writer._writer
        appends = file.fs_supports_append and file.write_started
    except AttributeError:  # tensorboardX, TensorFlow's files, another release
        return False
    if closed or not appends:
        return False
    with lock:
        queue.join()
        writer._check_worker_status()  # raises the error of the writer's thread
        with whole_append(os.fsdecode(file.filename)):
            file.write(records)
    return True
