"""An option: type, range and purpose; from a command line to checked configurations. Nothing here imports torch."""

# The environment variable that stands for `--config-dir`, also in the processes that this one starts.
CONFIG_DIR = "BATCHSCOPE_CONFIG_DIR"
