"""A program like a sweep's run, whose server imports nothing and whose runs do what their words say in Python."""

import sys

from batchscope.sweep import fork_server

if __name__ == "__main__":
    if sys.argv[1] == fork_server.SERVE:
        fork_server.IMPORTED = ()
        fork_server.serve()
    exec(sys.argv[1])  # noqa: S102 - a line of a test
