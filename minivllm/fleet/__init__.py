"""Simulators of machines that aren't here, on a clock that only counts. Standard library alone."""
