"""A model, a dataset and a callback that batchscope trains by the YAML files in conf/."""
