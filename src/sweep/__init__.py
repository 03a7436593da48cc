"""The runs of a sweep: folders, processes, launchers, and the search for a batch size."""
