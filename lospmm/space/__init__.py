"""The tiling space: candidates, constraints, row regrouping, the estimate, the ranker's features."""
