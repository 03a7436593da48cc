"""The commands behind `batchscope`, one a file: they parse, call, and print."""
