"""Page faults of this process, as the system counts them."""

try:
    import resource
except ImportError:  # Windows
    resource = None


def page_faults() -> int:
    """The faults so far that needed no disk; 0 on a system that does not count them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0
