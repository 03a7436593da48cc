"""The process of somebody's script under `batchscope run --vary`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from ..errors import UserError
from ..records.read import FILE
from ..records.run_record import Status, close_open
from .process import Child, in_own_session


class ScriptProcess(Child):
    """A script that is measured, in a session of its own: a signal to the command reaches it once.

    Its first fit has the folder `run_dir`, and the second one `<run_dir>-2`. `variable` names a variable of its
    environment: a descriptor that is at its end when this process is. UserError if it cannot be started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], run_dir: Path, variable: str):
        self.run_dir = run_dir
        theirs, self._ours = os.pipe()  # ours closes with this process, however it ends
        try:
            known = {**environ, variable: str(theirs)}
            super().__init__(in_own_session(command, env=known, pass_fds=[theirs]))
        except UserError:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)

    def fits(self) -> list[Path]:
        """The folders of its fits that have a record, in their order."""
        later = sorted(self.run_dir.parent.glob(f"{self.run_dir.name}-*"), key=lambda path: (len(path.name), path.name))
        return [folder for folder in (self.run_dir, *later) if (folder / FILE).is_file()]

    @override
    def _record_end(self, status: Status, reason: str) -> None:
        os.close(self._ours)
        for folder in self.fits():
            close_open(folder, status, reason)
