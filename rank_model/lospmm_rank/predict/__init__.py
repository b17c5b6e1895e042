"""Predictions by shipped weights: the rank model, corrected forecasts, the untimed choice."""
