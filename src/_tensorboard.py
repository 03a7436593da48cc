"""Everything private in TensorBoard that batchscope touches, as read in tensorboard 2.21: a writer's file."""

from typing import Any


def append_to_event_file(file_writer: Any, records: bytes) -> bool:
    """Append finished records to the file of a torch `FileWriter`, behind everything that it was given before.

    TensorBoard's writer takes one event at a time: a thread computes its checksum in Python, and opens and closes the
    file. Returns False, and writes nothing, for a writer of another kind, one that is closed, and a file system without
    appending.
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
        file.write(records)
    return True
