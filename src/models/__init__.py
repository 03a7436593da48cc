"""The zoo: plain nn.Modules that know nothing of Lightning, Hydra or devices. One family a file."""
