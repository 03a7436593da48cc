"""The runs of a sweep: folders, processes, and the searches for a batch size, a target and a change."""
