"""Training of the rank model: measurements collected, a dataset, LightGBM, a model card."""
