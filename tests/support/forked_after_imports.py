"""The same as forked.py, with the imports of a sweep's server."""

import sys

from batchscope.sweep import fork_server

if __name__ == "__main__":
    if sys.argv[1] == fork_server.SERVE:
        fork_server.serve()
    exec(sys.argv[1])  # noqa: S102 - a line of a test
