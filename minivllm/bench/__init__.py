"""Workloads and measurements, the same that other engines are measured with."""
