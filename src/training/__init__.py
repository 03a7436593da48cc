"""One run: seed, data, callbacks, trainer, model, fit, test, record."""
