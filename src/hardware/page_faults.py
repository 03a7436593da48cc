"""Page faults of this process, as the system counts them."""

from typing import NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None


class PageFaults(NamedTuple):
    """Faults so far that needed no disk; 0 on a system that does not count them."""

    process: int
    thread: int  # of these, of the thread that asks; all of them where the system does not tell threads apart

    def since(self, before: "PageFaults") -> tuple[int, int]:
        """The faults after an earlier moment."""
        return self.process - before.process, self.thread - before.thread


def page_faults() -> PageFaults:
    """The faults of this process so far."""
    if resource is None:
        return PageFaults(0, 0)
    process = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if not hasattr(resource, "RUSAGE_THREAD"):  # macOS
        return PageFaults(process, process)
    return PageFaults(process, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
