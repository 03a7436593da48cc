"""An option: type, range and purpose; from a command line to checked configurations. Nothing here imports torch."""
