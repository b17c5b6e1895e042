"""Training of the rank model: collection of measurements, data set, LightGBM, model card."""
