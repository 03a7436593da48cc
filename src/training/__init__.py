"""One run: seed, data, model, callbacks, trainer, fit, test, record."""
