"""The loop: one engine step, outputs, start-up."""
