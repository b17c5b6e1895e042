"""The tuner: prepare a problem, race its candidates, build, verify and compare the winner."""
