"""Predictions from shipped weights: the rank model, corrected forecasts, the choice without timing."""
